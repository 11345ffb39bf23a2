"""What a base model is known by: a digest of the weights a pruner's choice depends on, tower and projector.

Loading a pruner onto another base than its own would choose other tokens and say nothing. The digest is of every value,
and the same whether a checkpoint is loaded as float32 or bfloat16; a base that was quantised while it was loaded is
known by the files it was made from.
"""

import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diffprune.json_files import short

_PREFIX = "all:"  # of a digest of all values; those without are of samples, in pruners of older versions
_SAMPLED_VALUES = 1024
_SMALLEST_NORMAL_HALF = 113 << 7  # the bits of 2 ** -14 as a bfloat16
_THREADS = 4


def fingerprint(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """A short text that differs between the vision and projector weights of two base models.

    Hashes every name, shape and value. Values are rounded to bfloat16 and those too small for a float16 become 0, so a
    16-bit checkpoint has one fingerprint whether it is loaded as float32, bfloat16 or float16. (A float32 checkpoint
    has one for float32 and bfloat16, and another for float16, where it is rounded twice.) The order of the tensors does
    not matter.
    """
    with ThreadPoolExecutor(_THREADS) as pool:  # hashing lets go of the interpreter
        parts = sorted(pool.map(lambda item: _digest(*item), tensors))
    return _PREFIX + hashlib.sha256(b"".join(parts)).hexdigest()[:32]


def _digest(name: str, tensor: Tensor) -> bytes:
    digest = hashlib.sha256(f"{name}{tuple(tensor.shape)}".encode())  # in hardware on most machines
    for part in _plain_parts(tensor.detach()):
        digest.update(_rounded(part).data)
    return digest.digest()


def _plain_parts(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor, or what one of a quantising library's own kinds is made of."""
    if type(tensor) in (Tensor, torch.nn.Parameter) or not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    for name in names:
        yield from _plain_parts(getattr(tensor, name))


def _rounded(tensor: Tensor) -> np.ndarray:
    """The bits of the values as bfloat16, those too small for a float16 as 0 (in NumPy: thrice as fast)."""
    bits = tensor.flatten().to(torch.bfloat16).cpu().contiguous().view(torch.int16).numpy()
    return bits * ((bits & 0x7FFF) >= _SMALLEST_NORMAL_HALF)


def sampled_fingerprint(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Every name and shape, and 1,024 evenly spaced values of each tensor: quick for billions of weights.

    Pruners of older versions have this fingerprint.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(tensors, key=lambda item: item[0]):
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        flat = tensor.detach().flatten()
        if flat.numel() > _SAMPLED_VALUES:
            flat = flat[torch.arange(_SAMPLED_VALUES, device=flat.device) * flat.numel() // _SAMPLED_VALUES]
        digest.update(_rounded(flat).tobytes())
    return digest.hexdigest()


# Of a backbone -------------------------------------------------------------------------------------------------------


def vision_state(backbone: Any) -> dict[str, Tensor]:
    """The weights a pruner depends on: the vision tower's and the projector's."""
    return {
        f"{part}.{key}": value
        for part, module in backbone.vision_modules().items()
        for key, value in module.state_dict().items()
    }


def base_fingerprint(backbone: Any) -> str:
    """The fingerprint of a base model: of its files, where it was quantised while it was loaded."""
    return fingerprint(_unquantised(backbone).items())


def is_base(backbone: Any, wanted: str) -> bool:
    """Whether a base model is the one with that fingerprint, whichever version wrote it."""
    state = _unquantised(backbone).items()
    return (fingerprint if wanted.startswith(_PREFIX) else sampled_fingerprint)(state) == wanted


def features_of(backbone: Any) -> dict[str, Any]:
    """Where the features that a pruner scores are taken, and how pictures are scaled before the tower sees them."""
    images = getattr(backbone.processor, "image_processor", None)
    scale = {key: getattr(images, key, None) for key in ("image_mean", "image_std")}
    return {
        "layer": getattr(backbone.config, "vision_feature_layer", None),
        "before": "projector",
        **{key: None if value is None else [float(part) for part in value] for key, value in scale.items()},
    }


def other_features(backbone: Any, wanted: Mapping[str, Any]) -> str | None:
    """The first thing a saved pruner says of its features that is otherwise here, in words; None where all is the same.

    Pruners of older versions say nothing of the pictures' scale, which is then not compared.
    """
    found = features_of(backbone)
    if "layer" in wanted and wanted["layer"] != found["layer"]:
        return f"its features are those of layer {short(wanted['layer'])}, and here of layer {short(found['layer'])}"
    for key, words in (("image_mean", "mean"), ("image_std", "deviation")):
        before, now = wanted.get(key), found[key]
        if (
            before is not None
            and now is not None
            and (len(before) != len(now) or not np.allclose(before, now, 0, 1e-4))
        ):
            return f"its pictures were scaled by a {words} of {short(before)}, and here by one of {short(now)}"
    return None


def quantised_from(model: Any) -> str | None:
    """The plain checkpoint that a model was quantised from while it was loaded; None where it was not."""
    from transformers import PreTrainedConfig

    name = getattr(model.config, "_name_or_path", "")
    if not getattr(model, "is_quantized", False) or not name:
        return None
    raw, _ = PreTrainedConfig.get_config_dict(name, revision=getattr(model.config, "_commit_hash", None))
    return None if raw.get("quantization_config") else name


def _unquantised(backbone: Any) -> dict[str, Tensor]:
    """Tower and projector as the checkpoint's files hold them where the model in memory is quantised, else as it is."""
    name = quantised_from(backbone.model)
    if name is None:
        return vision_state(backbone)
    revision = getattr(backbone.model.config, "_commit_hash", None)
    return vision_state(read_again(type(backbone), name, backbone.processor, revision=revision))


def read_again(family: Any, name: str, processor: Any, *, revision: str | None = None) -> Any:
    """The backbone of a checkpoint's files, for its tower and projector: the language model has a single layer.

    It is read by transformers' own loader: names in files differ from those of modules, and the loader knows how.
    """
    from transformers import AutoConfig, AutoModelForImageTextToText

    options: dict[str, Any] = {} if revision is None else {"revision": revision}
    config = AutoConfig.from_pretrained(name, **options, trust_remote_code=False)
    text = config.get_text_config()
    text.num_hidden_layers = 1
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:1]
    with _quiet():  # it would list every layer that is left out
        model = AutoModelForImageTextToText.from_pretrained(
            name, config=config, dtype="auto", **options, trust_remote_code=False
        )
    return family(model, processor)


@contextmanager
def _quiet() -> Iterator[None]:
    """No log lines of transformers inside."""
    logger = logging.getLogger("transformers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
