"""A saved pruner on disk: `config.json`, `model.safetensors` (scorer only) and a model card. Never pickle.

save_pruner(folder, state=pruner.state_dict(), config={"method": {"name": "diffprune", ...}, ...})
config, state = load_pruner(folder)

"""

import dataclasses
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from diffprune.fingerprint import base_fingerprint, features_of
from diffprune.json_files import read_json, require_kind, short
from diffprune.results import Row, library_versions, markdown_table

FORMAT = 1
_SAVE_AGAIN = "save or download the pruner again"
CONFIG_FILE, WEIGHTS_FILE, CARD_FILE = "config.json", "model.safetensors", "README.md"
FILES = (WEIGHTS_FILE, CARD_FILE, CONFIG_FILE)
SAVED = ".saved"  # folder of a save whose files are being moved

# What a config must hold; `format`, `versions` and `weights_digest` are filled in when saving.
#   method     {"name", "options"}
#   base       {"id", "revision", "model_type", "fingerprint"}: the model it was trained on
#   features   where the features are taken
#   budgets    trained for, the smallest first: one, or the two ends of a range
#   positions  "original" or "packed"
# It may hold
#   choice     {"name", and its options}: how the scores are used, where the method's own rule is not what is deployed
# and may hold `recipe`: what it was trained by, for the rows that are measured with it.
CONFIG_KEYS: dict[str, type] = {"method": dict, "base": dict, "features": dict, "budgets": list, "positions": str}
_KINDS: dict[str, dict[str, Any]] = {
    "method": {"name": str, "options": dict[str, Any]},
    "base": {"id": str | None, "revision": str | None, "fingerprint": str, "model_type": str | None},
    "features": {"image_mean": list[float] | None, "image_std": list[float] | None},
}
SCORER_OPTIONS = ("scorer", "scorer_depth", "final_norm", "groups", "tiles")  # shared by a choice and what it deploys
_FILLED_KEYS = ("format", "versions", "weights_digest")


def exported_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The entries a deployed pruner needs: all but those with a part of their name starting with `throttle_`."""
    return {
        name: tensor
        for name, tensor in state.items()
        if not any(part.startswith("throttle_") for part in name.split("."))
    }


def model_card(
    config: Mapping[str, Any], card_rows: Sequence[Row] | None = None, name: str = "<this folder or repository>"
) -> str:
    """A README in the hub's form: what it is, how to use and to serve it, and the measured rows if there are any.

    Args:
        name: By which the reader can load it.
    """
    keep = config["budgets"][-1] if config["budgets"] else 64
    method, base = config["method"]["name"], config["base"]
    base_id = base["id"] or "a model without a name"
    # The hub takes nothing but an id of its own there, no folder and no model that a package brings along.
    hub_line = f"base_model: {base['id']}\n" if re.fullmatch(r"[\w.-]+/[\w.-]+", base["id"] or "") else ""
    budgets = " to ".join(str(budget) for budget in config["budgets"]) or "no budget"
    measured = markdown_table(card_rows) if card_rows else "Nothing has been measured with it yet.\n"
    recipe = f", recipe {config['recipe']}" if "recipe" in config else ""
    return f"""---
library_name: diffprune
{hub_line}tags: [visual-token-pruning, vision-language-model]
---

# {method} for {base_id}

A visual token pruner made with diffprune. It holds the scorer only; the base model is loaded from its own place.

```python
import diffprune as dp

vlm = dp.PrunedVLM.from_pretrained("{name}", keep={keep})
vlm.generate(images=[image], text="What does the sign say?", max_new_tokens=32)
```

Behind OpenAI's interface, with a page to try it at `/`; and inside vLLM, for the families that its plug-in takes:

```
diffprune serve --pruner "{name}" --keep {keep} --engine own
diffprune serve --pruner "{name}" --keep {keep} --engine vllm
```

- base model: {base_id}, revision {base["revision"]}, fingerprint `{base["fingerprint"]}`
- options: `{json.dumps(config["method"]["options"])}`
- choice: {json.dumps(config["choice"]) if "choice" in config else "the method's own"}
- trained for keep = {budgets}{recipe}; positions: {config["positions"]}

## Measured

{measured}"""


def _check_config(config: Mapping[str, Any]) -> None:
    """Raise where an entry is missing or of the wrong type."""
    for key, kind in CONFIG_KEYS.items():
        if not isinstance(config.get(key), kind):
            raise ValueError(f"{key} is {short(config.get(key))}: must be a {kind.__name__}")
    for section, kinds in _KINDS.items():
        for key, kind in kinds.items():
            if key not in config[section] and key in ("name", "options", "id", "revision", "fingerprint"):
                raise ValueError(f"{section}.{key} is missing")
            require_kind(config[section].get(key), kind, f"{section}.{key}")
    require_kind(config["budgets"], list[float], "budgets")
    choice = config.get("choice", {"name": ""})
    if not isinstance(choice, dict) or not isinstance(choice.get("name"), str):
        raise ValueError(f"choice is {short(choice)}: must be a dict with its name")


def save_pruner(
    folder: str | Path,
    *,
    state: Mapping[str, Tensor],
    config: Mapping[str, Any],
    card_rows: Sequence[Row] | None = None,
    name: str | None = None,
) -> None:
    """Write a pruner so that the folder holds the old one or the new one, whole, whenever the process ends.

    Everything is written into a folder of its own first, which one rename makes valid; then each file is moved into
    its place, and a load or save that finds some left moves them. Where a move fails, the old files are put back.
    Other files in `folder` (training checkpoints) are left alone.

    Args:
        folder: Made if it is not there.
        state: Of the whole pruner; the throttler is not saved.
        config: At least the entries of `CONFIG_KEYS`, all of it JSON.
        card_rows: Result rows for the model card.
        name: By which the card's readers load it.
    """
    try:
        _check_config(config)
    except ValueError as error:
        raise ValueError(f"cannot save this pruner: {error}") from None
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    finish_saving(folder)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".unfinished-", ignore_cleanup_errors=True) as temporary:
        new = Path(temporary) / SAVED
        new.mkdir()
        # copies, so that views and shared memory are written as plain tensors
        tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in state.items()}
        # Not by `save_file`, whose files are for their owner alone: these have the mode of any other file here.
        content = safetensors.torch.save(exported_state(tensors), metadata={"format": "pt"})
        (new / WEIGHTS_FILE).write_bytes(content)
        filled = {
            "format": FORMAT,
            **config,
            "versions": library_versions(),
            "weights_digest": _digest(new / WEIGHTS_FILE),
        }
        (new / CONFIG_FILE).write_text(json.dumps(filled, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        card = model_card(filled, card_rows, **({} if name is None else {"name": name}))
        (new / CARD_FILE).write_text(card, encoding="utf-8")
        before = Path(temporary) / "before"
        before.mkdir()
        for name in FILES:
            if (folder / name).exists():
                shutil.copy2(folder / name, before / name)
        os.replace(new, folder / SAVED)  # from here on it is the new one
        try:
            finish_saving(folder)
        except BaseException:
            shutil.rmtree(folder / SAVED)
            for name in FILES:
                if (before / name).exists():
                    os.replace(before / name, folder / name)
                else:
                    (folder / name).unlink(missing_ok=True)
            raise


def finish_saving(folder: Path) -> None:
    """Move what a save that was ended midway has left to be moved; nothing where there is nothing."""
    saved = folder / SAVED
    if not saved.is_dir():
        return
    for name in FILES:
        if (saved / name).exists():
            os.replace(saved / name, folder / name)
    shutil.rmtree(saved)


def _restore_hint(path: Path, restore: str | None, otherwise: str = _SAVE_AGAIN) -> str:
    return otherwise if restore is None else restore.format(path=path)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def load_pruner(folder: str | Path, *, restore: str | None = None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config and the scorer's state, both checked; a damaged or foreign file is refused by name.

    Args:
        restore: How to get a missing or damaged file back, the end of a sentence, with `{path}` where its path
            belongs. Default: save or download the pruner again.
    """
    folder = Path(folder)
    finish_saving(folder)
    config = _read_config(folder / CONFIG_FILE, restore)
    weights = folder / WEIGHTS_FILE
    if not weights.is_file():
        raise ValueError(f"{weights} is missing: {_restore_hint(weights, restore)}")
    try:
        state = safetensors.torch.load_file(weights)
    except safetensors.SafetensorError as error:
        raise ValueError(f"{weights} is damaged or no safetensors file: {_restore_hint(weights, restore)}") from error
    if _digest(weights) != config["weights_digest"]:
        raise ValueError(f"{weights} does not belong to the {CONFIG_FILE} beside it: {_restore_hint(weights, restore)}")
    return config, state


def _read_config(path: Path, restore: str | None) -> dict[str, Any]:
    if not path.is_file():
        written = "give a folder written by save_pretrained or by `diffprune train`"
        raise ValueError(f"{path} is missing: {_restore_hint(path, restore, written)}")
    try:
        config = read_json(path)
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): {_restore_hint(path, restore)}") from error
    if not isinstance(config, dict) or "format" not in config or "method" not in config:
        raise ValueError(f"{path} is not of a saved pruner: give a folder written by save_pretrained, not a base model")
    if config["format"] != FORMAT:
        raise ValueError(
            f"{path} has format {short(config['format'])} and this version reads {FORMAT}: upgrade diffprune"
        )
    try:
        _check_config(config)
        if missing := [key for key in _FILLED_KEYS if key not in config]:
            raise ValueError(f"{missing[0]} is missing")
    except ValueError as error:
        raise ValueError(f"{path}: {error}; {_restore_hint(path, restore)}") from error
    return config


# A model with its method ---------------------------------------------------------------------------------------------


def describe(vlm: Any, *, base_id: str | None = None, notes: str = "") -> dict[str, Any]:
    """Everything about a `PrunedVLM`'s pruner but its weights, as saved in `config.json`."""
    config, method = vlm.base.config, vlm.method
    options, choice = dataclasses.asdict(method.options), {}
    name = method.deploys or method.name
    if method.deploys:  # its weights are another method's, which is what is saved
        trained = method.trained_as[0] if method.trained_as else None
        own = {} if trained is None else dataclasses.asdict(trained.options)
        name = name if trained is None else trained.name
        rule = {"name": method.choice_name}
        choice = {"choice": rule | {key: value for key, value in options.items() if key not in SCORER_OPTIONS}}
        options = own or {key: value for key, value in options.items() if key in SCORER_OPTIONS}
    return {
        "method": {"name": name, "options": options},
        **choice,
        "base": {
            "id": base_id or getattr(config, "_name_or_path", "") or "",
            "revision": getattr(config, "_commit_hash", None),
            "model_type": config.model_type,
            "fingerprint": base_fingerprint(vlm.backbone),
        },
        "features": features_of(vlm.backbone),
        "budgets": list(vlm.trained_for) or [vlm.budget.keep],
        "positions": vlm.positions,
        "newline": vlm.backbone.keeps_newlines,
        "budget": vlm.budget_rule,
        **({"recipe": vlm.artefact["recipe"]} if "recipe" in vlm.artefact else {}),
        "notes": notes,
    }
