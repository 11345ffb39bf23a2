"""What answers follow from, in short texts, so that answers of another run are told apart and never mixed."""

from collections.abc import Hashable, Sequence
from hashlib import blake2b

from torch import Tensor

from diffprune.evaluate.encoded import all_asked, picture_key
from diffprune.evaluate.runner import Measurement
from diffprune.evaluate.sources import Questions
from diffprune.fingerprint import fingerprint
from diffprune.model import PrunedVLM
from diffprune.results import library_versions
from diffprune.saving import exported_state

LENGTH = 12  # letters of a digest


def made_by(
    vlm: PrunedVLM, questions: Questions, measurements: Sequence[Measurement], *, max_new_tokens: int
) -> dict[str, str]:
    """Questions, model, pruners, methods, budgets, position rule, length and versions, each as a short text."""
    asked = all_asked(questions)
    known: dict[Hashable, str] = {}  # a picture is asked about many times

    def shown(image: object) -> str:
        key = picture_key(image)
        if key not in known:
            known[key] = questions.identity(image)
        return known[key]

    lines = [
        repr((one.id, one.prompt, one.turns, one.answers, one.choices, one.subset, one.group, *map(shown, one.images)))
        for one in asked
    ]
    tasks = [(task.name, len(task.questions), task.metric_name) for task in questions.tasks]
    return {
        "questions": f"{len(asked)}, {digest(repr(tasks), *lines)}",
        **measured_by(vlm, measurements),
        "length": f"{max_new_tokens} tokens",
    }


def measured_by(vlm: PrunedVLM, measurements: Sequence[Measurement]) -> dict[str, str]:
    """What answers to any questions follow from: model, pruners, methods, budgets, position rule and versions."""
    runs = [(one.method, one.keep, one.seed, one.blind, one.shrunk, one.throttle) for one in measurements]
    weights = [
        (f"{number}.{name}", tensor)
        for number, one in enumerate(measurements)
        for name, tensor in _weights(one).items()
        if tensor.numel()
    ]
    rules = [(one.pruner.name, one.pruner.options) for one in measurements if _weights(one)]  # `choice` among them
    model = str(getattr(vlm.base.config, "_name_or_path", "")).rstrip("/").rpartition("/")[2]
    return {
        "model": " ".join(filter(None, [model, fingerprint(vlm.base.named_parameters())[:LENGTH]])),
        "pruners": f"{fingerprint(weights)[:LENGTH]}, {digest(repr(rules))}" if weights else "none",
        "budgets": ", ".join(dict.fromkeys(str(one.keep) for one in measurements)) or "1.0",
        "methods": f"{', '.join(dict.fromkeys(one.method for one in measurements)) or 'full'}, {digest(repr(runs))}",
        "positions": f"{vlm.positions}, newlines {vlm.backbone.keeps_newlines}, {vlm.budget_rule}",
        "precision": f"{vlm.base.dtype}".removeprefix("torch.") + f" on {vlm.base.device.type}",
        "versions": ", ".join(f"{name} {version}" for name, version in library_versions().items()),
    }


def _weights(one: Measurement) -> dict[str, Tensor]:
    """What a measurement's answers depend on; a saved pruner's throttler starts anew in every process, unused."""
    state = one.pruner.state_dict()
    return state if one.throttle is not None else exported_state(state)


def digest(*texts: str) -> str:
    """Of some texts, in a few letters."""
    return blake2b("\n".join(texts).encode(), digest_size=LENGTH // 2).hexdigest()
