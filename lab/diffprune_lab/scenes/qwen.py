"""Three sizes of one native-resolution model for scenes: Qwen2.5-VL in miniature, from stock Hugging Face classes.

`scenes-qwen-s`, `-m` and `-l` see pictures of any size, one language token for every 16 x 16 pixels (2 x 2 patches of
8), through a tower in which every second block attends within windows of 64 x 64 pixels. As in the large models the
tower is the same in all sizes, and the decoders differ. Their weights are trained by `pretrain.py` beside this file and
are not part of the package.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessorPil,
)
from transformers.processing_utils import ProcessorMixin

from diffprune_lab.scenes import reference
from diffprune_lab.scenes.reference import END, PAD, START
from diffprune_lab.scenes.sizes import SIDES, SIZES_FILE

SPECIALS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}
PATCH, MERGE, WINDOW = 8, 2, 64
UNIT = PATCH * MERGE  # pixels along one side of what a language token looks at
HEAD = 32
CHAT_TEMPLATE = reference.CHAT_TEMPLATE.replace("<image>", "<|vision_start|><|image_pad|><|vision_end|>")


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenSpec:
    """The sizes of one model."""

    vision_width: int
    vision_blocks: int
    vision_hidden: int
    text_width: int
    text_layers: int
    text_hidden: int
    patch: int = UNIT  # what a language token looks at, as in `reference.ReferenceSpec`
    head_width: int = HEAD
    start: str | None = None  # the reference model whose decoder, grown where it is smaller, this one starts from

    @property
    def full_blocks(self) -> list[int]:
        """Blocks with attention over the whole picture: every second one, and the last."""
        return list(range(self.vision_blocks - 1, -1, -2))[::-1]


_TOWER = {"vision_width": 192, "vision_blocks": 8, "vision_hidden": 384}  # of all sizes
SPECS = {
    "scenes-qwen-s": QwenSpec(**_TOWER, text_width=128, text_layers=4, text_hidden=256, start="scenes-nano"),
    "scenes-qwen-m": QwenSpec(**_TOWER, text_width=256, text_layers=6, text_hidden=512, start="scenes-llava"),
    "scenes-qwen-l": QwenSpec(**_TOWER, text_width=384, text_layers=8, text_hidden=768, start="scenes-llava"),
}


def qwen_spec(name: str) -> QwenSpec:
    """The sizes of the model called `name`."""
    if name not in SPECS:
        raise ValueError(f"There is no model {name!r}: choose one of {', '.join(SPECS)}.")
    return SPECS[name]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The scenes tokenizer with Qwen's marks for pictures behind its own tokens."""
    return reference.build_tokenizer(specials=SPECIALS)


class ImageProcessor(Qwen2_5_VLProcessor):
    """The stock processor without its video half, which cannot be built where torchvision is missing.

    The parts of a processor are read off its `__init__`, so leaving one out of the signature is enough.
    """

    def __init__(
        self,
        image_processor: Any = None,
        tokenizer: Any = None,
        chat_template: str | None = None,
    ) -> None:
        self.image_token, self.video_token = tokenizer.image_token, tokenizer.video_token
        self.image_token_id, self.video_token_id = tokenizer.image_token_id, tokenizer.video_token_id
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


def build_processor(tokenizer: PreTrainedTokenizerFast) -> ImageProcessor:
    """The processor; pictures of the world's sizes are not resized by it."""
    images = Qwen2VLImageProcessorPil(
        patch_size=PATCH,
        merge_size=MERGE,
        temporal_patch_size=2,
        size={"shortest_edge": (SIDES[0] // 2) ** 2, "longest_edge": (2 * SIDES[-1]) ** 2},
    )
    return ImageProcessor(image_processor=images, tokenizer=tokenizer, chat_template=CHAT_TEMPLATE)


def qwen_config(spec: QwenSpec, tokenizer: PreTrainedTokenizerFast) -> Qwen2_5_VLConfig:
    """The stock configuration with the sizes of `spec`."""
    marks: Any = tokenizer
    text: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": spec.text_width,
        "intermediate_size": spec.text_hidden,
        "num_hidden_layers": spec.text_layers,
        "num_attention_heads": spec.text_width // spec.head_width,
        "num_key_value_heads": spec.text_width // spec.head_width,
        "max_position_embeddings": 2048,
        "initializer_range": 0.05,  # about 1 / sqrt(width), as in the other reference models
        "rms_norm_eps": 1e-6,  # this and the base of positions are those of the decoders they start from
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": sections(spec.head_width),
        },
        "pad_token_id": PAD,
        "bos_token_id": START,
        "eos_token_id": END,
    }
    vision: dict[str, Any] = {
        "depth": spec.vision_blocks,
        "hidden_size": spec.vision_width,
        "intermediate_size": spec.vision_hidden,
        "num_heads": spec.vision_width // spec.head_width,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "window_size": WINDOW,
        "fullatt_block_indexes": spec.full_blocks,
        "out_hidden_size": spec.text_width,
        "initializer_range": 0.05,
    }
    return Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=marks.image_token_id,
        video_token_id=marks.video_token_id,
        vision_start_token_id=marks.vision_start_token_id,
        vision_end_token_id=marks.vision_end_token_id,
        tie_word_embeddings=False,
    )


def sections(head_width: int) -> list[int]:
    """How many frequencies of a head go to time, row, column, time, ...: one at a time, what is left to the last.

    In one run each, as in the large models, columns would get the slowest frequencies alone, which do not separate a
    handful of them apart.
    """
    count = head_width // 2
    turns = count - count % 3  # a multiple of 3, as the stock class repeats the list for the second half of a head
    return [1] * (turns - 1) + [1 + count - turns]


def build_model(
    spec: QwenSpec, tokenizer: PreTrainedTokenizerFast, *, seed: int = 0
) -> Qwen2_5_VLForConditionalGeneration:
    """An untrained model in float32."""
    torch.manual_seed(seed)
    model = Qwen2_5_VLForConditionalGeneration(qwen_config(spec, tokenizer))
    generation: Any = model.generation_config
    generation.pad_token_id, generation.bos_token_id, generation.eos_token_id = PAD, START, END
    return model


# Files ---------------------------------------------------------------------------------------------------------------


def save_model(name: str, model: Qwen2_5_VLForConditionalGeneration, folder: Path, *, card: str) -> None:
    """Writes the model in the layout of the hub, with a note of the sizes of pictures it was made for."""
    reference.save_reference(model, build_processor(build_tokenizer()), folder, card=card)
    (folder / SIZES_FILE).write_text(json.dumps({"sizes": "varying", "model": name}) + "\n", encoding="utf-8")


def named_in(folder: str | Path) -> str | None:
    """Which of these models the folder holds; None where it holds another one, or none."""
    path = Path(folder) / SIZES_FILE
    if not path.is_file():
        return None
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None
    name = said.get("model") if isinstance(said, Mapping) else None
    return name if name in SPECS else None


def load_model(folder: str | Path, **options: Any) -> tuple[Any, ImageProcessor]:
    """The trained model, ready to answer, and its processor; the stock loader needs torchvision for the latter.

    Args:
        folder: What `save_model` wrote.
        options: Of the stock `from_pretrained`, such as a dtype.
    """
    if named_in(folder) is None:
        raise ValueError(f"{folder} holds none of {', '.join(SPECS)}: train them with runs/scaling.sh.")
    reference.check_shards(Path(folder))
    loaded: Any = Qwen2_5_VLForConditionalGeneration.from_pretrained(
        folder, local_files_only=True, output_loading_info=True, **options
    )
    model, report = loaded
    wrong = {key: value for key, value in report.items() if value}
    if wrong:
        raise ValueError(f"The weights in {folder} do not fit the model they name: {wrong}.")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    return model.eval(), build_processor(tokenizer)
