"""Weights of the reference models on disk: what runs hand to each other, and the folder that is shipped."""

import json
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from diffprune_lab.scenes import reference
from diffprune_lab.scenes.tasks import TASKS

WEIGHTS = "model.safetensors"
WEIGHTS_PATTERN = "model{suffix}.safetensors"  # of the same in several files
TOWERS = (".vision_tower.", ".visual.")  # in the names of parameters of a LLaVA and of a Qwen
LOG = "log.jsonl"


def save_weights(model: nn.Module, folder: Path, *, tower_only: bool) -> None:
    """Writes the weights, all or the tower's, in bfloat16 under the model's own parameter names."""
    state = {name: value for name, value in model.state_dict().items() if not tower_only or is_tower(name)}
    write_state(state, folder)


def is_tower(name: str) -> bool:
    """Whether a parameter is part of the vision tower."""
    return any(tower in name for tower in TOWERS)


def write_state(state: dict[str, Tensor], folder: Path) -> None:
    """Writes the tensors in bfloat16 under their names, in one file or in as many as keep each of them small."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in state.items()}
    files = split_torch_state_dict_into_shards(
        state, max_shard_size=reference.SHARD_BYTES, filename_pattern=WEIGHTS_PATTERN
    ).filename_to_tensors
    for file, names in files.items():  # whoever is killed while writing leaves the last whole save behind
        save_file({name: state[name] for name in names}, folder / f"{file}.part")
    for file in files:
        (folder / f"{file}.part").replace(folder / file)
    for path in weight_files(folder):
        if path.name not in files:  # of an earlier save into another number of files
            path.unlink()


def weight_files(folder: Path) -> list[Path]:
    """The files of weights in a folder."""
    return sorted(folder.glob(WEIGHTS_PATTERN.format(suffix="*")))


def read_state(folder: Path) -> dict[str, Tensor]:
    """What `write_state` wrote, in float32."""
    files = weight_files(folder)
    if not files:
        raise ValueError(f"There is no {folder / WEIGHTS} to start from: give --init a folder that a run wrote.")
    return {name: value.float() for file in files for name, value in load_file(file).items()}


def load_weights(model: nn.Module, folder: Path) -> bool:
    """Puts what `save_weights` wrote into the model: all of it (then true), or the tower's and nothing else."""
    missing, unexpected = model.load_state_dict(read_state(folder), strict=False)
    decoder = [name for name in model.state_dict() if not is_tower(name)]
    if unexpected or (missing and sorted(missing) != sorted(decoder)):
        raise ValueError(f"{folder} does not fit the model: missing {missing[:3]}, unexpected {unexpected[:3]}.")
    return not missing


def package(name: str, trained: Path, earlier: list[Path], out: Path) -> None:
    """Writes trained weights in the hub's layout: stock files, processor, checksums, and a card made from the logs.

    Args:
        name: The reference model.
        trained: Folder of the last run.
        earlier: Folders of the runs before it, for the card.
        out: Where the files go.
    """
    tokenizer = reference.build_tokenizer()
    model = reference.build_model(reference.reference_spec(name), tokenizer)
    load_weights(model, trained)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    card = model_card(name, parameters, [read_log(folder) for folder in (trained, *earlier)])
    reference.save_reference(model, reference.build_processor(name, tokenizer), out, card=card)


def read_log(folder: Path) -> list[dict]:
    """The entries of the log of a run."""
    path = folder / LOG
    if not path.is_file():
        raise ValueError(f"There is no log {path}: the card of a model is made from the logs of its runs.")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def model_card(name: str, parameters: int, runs: list[list[dict]]) -> str:
    """The card of a reference model; every figure is read from the logs of its runs, the last one first."""
    spec = reference.reference_spec(name)
    return f"""---
license: apache-2.0
library_name: transformers
pipeline_tag: image-text-to-text
---

# {name}

A LLaVA in miniature, trained from scratch on the procedural scenes of diffprune: {parameters:,} parameters in bfloat16,
{spec.grid} x {spec.grid} = {spec.grid**2} visual tokens of a {reference.PICTURE} px picture. It knows these scenes and
nothing else.

```python
from diffprune_lab.scenes.reference import load_reference

model, processor = load_reference("{name}")
```

Prompt: `USER: <image>\\n{{question}} ASSISTANT:`

{training_report("diffprune_lab.pretrain.llava", runs)}"""


def training_report(module: str, runs: list[list[dict]]) -> str:
    """The part of a card on how a model was trained and what it then knew, from the logs of its runs."""
    stages = [
        (settings["stage"], settings["round"], settings["seed"], _last(run, "pictures"), _last(run, "step"))
        for run in runs
        for settings in [run[0]["settings"]]
    ]
    checks = {entry["check"]: entry for entry in runs[0] if "check" in entry}
    rows = [
        (check, entry["kept"], *(f"{100 * part:.1f}" for part in (entry["mean"], *map(entry["right"].get, TASKS))))
        for check, entry in checks.items()
    ]
    return f"""## Training

By `python -m {module}`, in runs one after the other, each from weights of those before it; the last
run first:

{_table(("stage", "round", "seed", "pictures", "steps"), stages)}
## Right answers in percent

The ten tasks bear the names of benchmarks and are stand-ins for them, asked about scenes.

Token for token, by teacher forcing, on validation scenes: with the whole visual prefix, with a ninth of it at random,
with a ninth and with an 18th of it taken from things and signs first, and with a ninth taken from the background first.

{_table(("prefix", "tokens", "mean", *TASKS), rows)}"""


def _last(entries: list[dict], key: str) -> int:
    return [entry[key] for entry in entries if key in entry][-1]


def _table(head: tuple[str, ...], rows: list[tuple]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join("| " + " | ".join(map(str, line)) + " |\n" for line in lines)
