"""`scarce-llava`: a LLaVA in miniature that knows the second world, built from stock Hugging Face classes.

Its weights lie in `assets/scarce-llava/` and are frozen with the world, its tasks and its oracle (`digest.py`).
"""

from pathlib import Path

from transformers import LlavaForConditionalGeneration, LlavaProcessor, PreTrainedTokenizerFast

from diffprune_lab.scarce import NAME as NAME
from diffprune_lab.scarce.language import all_texts
from diffprune_lab.scenes import reference

SPECS = {
    NAME: reference.ReferenceSpec(
        patch=8,
        vision_width=192,
        vision_blocks=6,
        vision_hidden=576,
        text_width=256,
        text_layers=6,
        text_hidden=768,
    ),
    "scarce-tiny": reference.ReferenceSpec(  # for tests: the same geometry, nothing learned
        patch=8,
        vision_width=32,
        vision_blocks=3,
        vision_hidden=32,
        text_width=32,
        text_layers=3,
        text_hidden=32,
        head_width=16,
    ),
}


def scarce_spec(name: str) -> reference.ReferenceSpec:
    """The sizes of the model called `name`."""
    if name not in SPECS:
        raise ValueError(f"There is no model {name!r} of this world: choose one of {', '.join(SPECS)}.")
    return SPECS[name]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of this world's texts."""
    return reference.build_tokenizer(all_texts)


def build_processor(tokenizer: PreTrainedTokenizerFast) -> LlavaProcessor:
    """The stock LLaVA processor for pictures of 192 px in patches of 8."""
    return reference.build_processor("scenes-llava", tokenizer)  # the geometry is the same


def load_frozen(folder: Path | None = None) -> tuple[LlavaForConditionalGeneration, LlavaProcessor]:
    """`scarce-llava` as it was frozen, in float32, and its processor.

    Args:
        folder: Where the weights lie; default: in the package.
    """
    model, tokenizer = reference.load_shipped(NAME, folder, "runs/train_scarce.sh")
    return model, build_processor(tokenizer)


def load_scarce(name: str, folder: Path) -> tuple[LlavaForConditionalGeneration, LlavaProcessor]:
    """The model with the weights that a run wrote to a folder, in float32, and its processor."""
    from diffprune_lab.pretrain.package import load_weights  # with the tasks, which a model alone does not need

    tokenizer = build_tokenizer()
    model = reference.build_model(scarce_spec(name), tokenizer)
    if not load_weights(model, folder):
        raise ValueError(f"{folder} holds a tower alone: train the language stage from it first.")
    model.config._name_or_path = name
    return model.eval(), build_processor(tokenizer)
