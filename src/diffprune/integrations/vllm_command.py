"""How vLLM is told to serve a pruned model: its command line and its configuration. vLLM itself is not imported.

    command("scenes-llava-diffprune", keep=64, port=8000)   # the arguments of the process that serves it
    engine_arguments("runs/llava-k64", keep=64)             # the same for Python: vllm.LLM(**engine_arguments(...))

What cannot be served is refused here already, in one sentence, before an engine takes minutes to start.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffprune.fingerprint import read_again
from diffprune.fitting import require_family
from diffprune.integrations.vllm import ARCHITECTURE, KEY
from diffprune.integrations.vllm_settings import (
    Settings,
    chosen_kind,
    deployed_name,
    read_pruner,
    refuse_family,
    refuse_method,
    rope_sections,
)
from diffprune.loading import describe_base, describe_processor, hub_id, served_name, source_of
from diffprune.saved_pruners import base_of, refuse_other_base


@dataclass(frozen=True, slots=True)
class Served:
    """A model as the engine is told of it.

    Args:
        model: Folder or hub id of the base model.
        revision: Of the base model.
        overrides: Of its configuration.
        template: A chat template instead of its own, where its own leaves out the start token.
    """

    model: str
    revision: str | None
    overrides: dict[str, Any]
    template: str | None


def describe_served(
    pruner: str = "none", *, model: str | None = None, base: str | None = None, **settings: Any
) -> Served:
    """What the engine must be told to serve a saved pruner, or with `none` any method around any model.

    Args:
        model: The base model of `pruner="none"`; a saved pruner names its own.
        base: Where the base model of a saved pruner lies, if not where it says.
        settings: Of `Settings`; None stands for the default.
    """
    given = {key: value for key, value in settings.items() if value is not None}
    revision = None
    if pruner == "none":
        if model is None:
            raise ValueError("--pruner none needs a base model: name one with --model")
        name = model
    else:
        folder, config = read_pruner(pruner)
        name, revision = base or model or base_of(config, folder), config["base"]["revision"]
        if not name:
            raise ValueError(f"{pruner} does not name its base model; give its folder or hub id with --model")
        given["pruner"] = str(folder.resolve()) if folder.is_dir() else pruner
        if "keep" not in given:
            if not config["budgets"]:
                raise ValueError(f"{pruner} names no budget that it was trained for; give keep=...")
            given["keep"] = config["budgets"][-1]
        given.setdefault("positions", config["positions"])
    wanted = Settings.read(given)
    source = source_of(name)
    where = str(source.folder(name).resolve()) if source is not None else hub_id(str(name))
    where = str(Path(where).resolve()) if Path(where).is_dir() else where
    described = describe_base(where, repr(name), **({} if revision is None else {"revision": revision}))
    family = require_family(described.model_type)
    refuse_family(family)
    refuse_method(chosen_kind(wanted, family, described), deployed_name(wanted))
    overrides: dict[str, Any] = {"architectures": [ARCHITECTURE], KEY: wanted.written()}
    if wanted.positions == "original" and family.plain_positions:
        overrides["text_config"] = {"rope_parameters": {"mrope_section": rope_sections(described)}}
    processor = describe_processor(where, described.model_type, **({} if revision is None else {"revision": revision}))
    return Served(where, revision, overrides, started_template(processor))


def require_base(pruner: str, served: Served) -> None:
    """An error where the model that would be served is not the base of the pruner, by its vision weights."""
    revision = {} if served.revision is None else {"revision": served.revision}
    model_type = describe_base(served.model, repr(served.model), **revision).model_type
    processor = describe_processor(served.model, model_type, **revision)
    base = read_again(require_family(model_type), served.model, processor, **revision)
    refuse_other_base(base, read_pruner(pruner)[1])


def started_template(processor: Any) -> str | None:
    """The chat template with the start token in front, where the tokenizer adds it and the template leaves it out.

    transformers adds the token to a laid-out chat that does not begin with it; vLLM's chat endpoint never does.
    """
    tokenizer, template = processor.tokenizer, getattr(processor, "chat_template", None)
    start = tokenizer.bos_token
    if start is None or not isinstance(template, str):
        return None
    (first, *_) = [*tokenizer("a")["input_ids"], None]
    laid_out = processor.apply_chat_template(
        [{"role": "user", "content": [{"type": "text", "text": "a"}]}], add_generation_prompt=True, tokenize=False
    )
    if first != tokenizer.bos_token_id or laid_out.startswith(start):
        return None
    return "{{ bos_token }}" + template


def engine_arguments(pruner: str = "none", **settings: Any) -> dict[str, Any]:
    """Arguments of `vllm.LLM` that serve a saved pruner, or a method around a model; see `describe_served`."""
    served = describe_served(pruner, **settings)
    further = {"revision": served.revision, "chat_template": served.template}
    given = {name: value for name, value in further.items() if value is not None}
    return {"model": served.model, "hf_overrides": served.overrides, **given}


def command(
    pruner: str = "none",
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    name: str | None = None,
    api_key: str | None = None,
    more: Sequence[str] = (),
    check_base: bool = False,
    **settings: Any,
) -> list[str]:
    """The arguments of the process that serves a saved pruner, or a method around a model, with vLLM's own server.

    Args:
        pruner: A saved pruner, or `none`.
        name: Under which requests ask for it; default: the pruner's or the model's.
        api_key: That requests must bring as a bearer token.
        more: Further arguments of vLLM, as they are.
        check_base: Read the base's vision weights and refuse a pruner of another base here, in one sentence; the engine
            would do so too, a minute later and with all its processes' traces.
        settings: Of `describe_served`: model, method, keep, positions, newline.
    """
    served = describe_served(pruner, **settings)
    if check_base and pruner != "none" and not settings.get("allow_other_base"):
        require_base(pruner, served)
    called = name or served_name(str(settings.get("model")) if pruner == "none" else pruner)
    out = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", served.model]
    out += ["--revision", served.revision] if served.revision is not None else []
    out += ["--served-model-name", called, "--host", host, "--port", str(port)]
    out += ["--hf-overrides", json.dumps(served.overrides), "--trust-request-mm-kwargs"]
    out += ["--chat-template", served.template] if served.template is not None else []
    out += ["--api-key", api_key] if api_key is not None else []
    return [*out, *more]
