"""Models of the real sizes with random weights: their configurations, their processors, and how one is built.

Speed depends on shapes alone, so a model that was never downloaded can be measured: `SHAPES["llava-1.5-7b"](False)` is
what the hub's configuration says, `True` the same kind of model small enough for a CPU.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from diffprune.registry import BACKBONES

CHARACTERS = 4096  # more than any prompt of a measurement
CPU_PARAMETERS = 2_000_000_000  # more than that a CPU neither trains nor measures in any time worth waiting for


def byte_tokenizer(image_token: str, *extra: str) -> Any:
    """Every byte is one token: enough to run a model whose weights are random."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    specials = ["<pad>", "<s>", "</s>", image_token, *extra]
    vocabulary = {token: index for index, token in enumerate(specials)}
    for character in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[character] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        padding_side="left",
        model_max_length=CHARACTERS,
        extra_special_tokens={"image_token": image_token},
    )
    fast.add_tokens(list(extra), special_tokens=True)  # else they are split into bytes
    return fast


def chat(image: str) -> str:
    """USER: <image>\\nquestion ASSISTANT:"""
    return (
        "{% for m in messages %}USER: {% for c in m['content'] %}{% if c['type'] == 'image' %}" + image + "\n"
        "{% elif c['type'] == 'text' %}{{ c['text'] }}{% endif %}{% endfor %}{% endfor %} ASSISTANT:"
    )


# --- LLaVA-1.5 and 1.6 ------------------------------------------------------------------------------------------------

_LLAMA: dict[str, dict[str, int]] = {
    "7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
    "13b": {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40},
}
_CLIP_LARGE = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
_SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
_SMALL_VOCABULARY = 300


def llava(size: str, tiny: bool) -> tuple[Any, Any]:
    """Configuration and processor of LLaVA-1.5."""
    from transformers import CLIPImageProcessorPil, LlavaConfig, LlavaProcessor

    images = CLIPImageProcessorPil(size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336})
    return _clip_and_llama(LlavaConfig, LlavaProcessor, images, size, tiny, image_seq_length=576)


def llava_next(size: str, tiny: bool) -> tuple[Any, Any]:
    """Configuration and processor of LLaVA-1.6: the same parts, over an overview and up to four tiles."""
    from transformers import LlavaNextConfig, LlavaNextImageProcessorPil, LlavaNextProcessor

    tiles = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
    images = LlavaNextImageProcessorPil(
        size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336}, image_grid_pinpoints=tiles
    )
    return _clip_and_llama(LlavaNextConfig, LlavaNextProcessor, images, size, tiny, image_grid_pinpoints=tiles)


def _clip_and_llama(
    configuration: Any, processor: Any, images: Any, size: str, tiny: bool, **more: Any
) -> tuple[Any, Any]:
    """CLIP's large tower at 336 pixels with a LLaMA, as that kind of model and processor."""
    from transformers import CLIPVisionConfig, LlamaConfig

    tokenizer = byte_tokenizer("<image>")
    sizes: dict[str, Any] = _SMALL if tiny else _LLAMA[size]
    text = LlamaConfig(
        **sizes,
        vocab_size=_SMALL_VOCABULARY if tiny else 32064,
        max_position_embeddings=4096,
        **_ends(tokenizer),
    )
    tower: dict[str, Any] = _SMALL if tiny else _CLIP_LARGE
    vision = CLIPVisionConfig(**tower, image_size=336, patch_size=14, projection_dim=768)
    image_id = tokenizer.convert_tokens_to_ids("<image>")
    config = configuration(vision_config=vision, text_config=text, image_token_index=image_id, **more)
    return config, processor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=chat("<image>"),
    )


# --- Qwen2.5-VL -------------------------------------------------------------------------------------------------------

_QWEN: dict[str, dict[str, Any]] = {
    "3b": {
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
    },
    "7b": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
    },
    "32b": {
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "vocab_size": 152064,
    },
}
_QWEN_MLP = {"3b": 3420, "7b": 3420, "32b": 3456}  # of the vision tower
_IMAGE, _VIDEO, _START, _END = "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"


def qwen(size: str, tiny: bool) -> tuple[Any, Any]:
    """Configuration and processor of Qwen2.5-VL."""
    from transformers import Qwen2_5_VLConfig

    tokenizer = byte_tokenizer(_IMAGE, _START, _END, _VIDEO)
    ids = tokenizer.convert_tokens_to_ids
    tied = size == "3b"
    text = (_SMALL | {"num_key_value_heads": 2, "vocab_size": _SMALL_VOCABULARY} if tiny else _QWEN[size]) | {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": [2, 3, 3] if tiny else [16, 24, 24],
        },
        "use_sliding_window": False,
        "tie_word_embeddings": tied,
        **_ends(tokenizer),
    }
    vision: dict[str, Any] = {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112}
    if tiny:
        vision |= {"depth": 3, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4}
        vision |= {"out_hidden_size": 64, "fullatt_block_indexes": [2]}
    else:
        vision |= {"depth": 32, "hidden_size": 1280, "intermediate_size": _QWEN_MLP[size], "num_heads": 16}
        vision |= {"out_hidden_size": _QWEN[size]["hidden_size"], "fullatt_block_indexes": [7, 15, 23, 31]}
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids(_IMAGE),
        video_token_id=ids(_VIDEO),
        vision_start_token_id=ids(_START),
        vision_end_token_id=ids(_END),
        tie_word_embeddings=tied,
    )
    return config, qwen_processor(tokenizer)


def qwen_processor(tokenizer: Any) -> Any:
    """The stock processor, without its video half where torchvision is missing: every video processor needs that."""
    from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessorPil
    from transformers.processing_utils import ProcessorMixin
    from transformers.utils.import_utils import is_torchvision_available

    sizes = {"shortest_edge": 4 * 28 * 28, "longest_edge": 16384 * 28 * 28}
    images = Qwen2VLImageProcessorPil(patch_size=14, merge_size=2, temporal_patch_size=2, size=sizes)
    template = chat(_START + _IMAGE + _END)
    if is_torchvision_available():
        from transformers import Qwen2VLVideoProcessor

        videos = Qwen2VLVideoProcessor()
        return Qwen2_5_VLProcessor(
            image_processor=images, tokenizer=tokenizer, video_processor=videos, chat_template=template
        )

    class ImageOnly(Qwen2_5_VLProcessor):
        """The parts of a processor are read off its `__init__`, so leaving one out of the signature is enough."""

        def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None) -> None:
            self.image_token, self.video_token = _IMAGE, _VIDEO
            self.image_token_id, self.video_token_id = tokenizer.convert_tokens_to_ids([_IMAGE, _VIDEO])
            ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)

    return ImageOnly(image_processor=images, tokenizer=tokenizer, chat_template=template)


def _ends(tokenizer: Any) -> dict[str, Any]:
    return {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }


# --- by name ----------------------------------------------------------------------------------------------------------

# A preset's configuration and processor; True asks for the tiny one.
SHAPES: dict[str, Callable[[bool], tuple[Any, Any]]] = {
    "llava-1.5-7b": partial(llava, "7b"),
    "llava-1.5-13b": partial(llava, "13b"),
    "llava-next-7b": partial(llava_next, "7b"),
    "llava-next-13b": partial(llava_next, "13b"),
    "qwen2.5-vl-3b": partial(qwen, "3b"),
    "qwen2.5-vl-7b": partial(qwen, "7b"),
    "qwen2.5-vl-32b": partial(qwen, "32b"),
}


def is_preset(name: str) -> bool:
    """Whether `diffprune backbones` lists the name, with or without a shape here."""
    return any(name in BACKBONES.get(family).presets for family in BACKBONES.names())


def build(config: Any, device: str, dtype: torch.dtype, seed: int = 0) -> nn.Module:
    """A model of that configuration with the random weights it starts with."""
    from transformers import AutoModelForImageTextToText

    torch.manual_seed(seed)
    with torch.device(device):
        return AutoModelForImageTextToText.from_config(config, dtype=dtype)


def require_gpu(
    name: str, config: Any, dtype: torch.dtype, device: str | torch.device, *, what: str, way_out: str
) -> None:
    """Raise, before anything is built or loaded, where a CPU would have to run a model of billions of parameters.

    Args:
        what: What the model is wanted for.
        way_out: The end of the sentence.
    """
    if torch.device(device).type != "cpu":
        return
    parameters = sum(parameter.numel() for parameter in build(config, "meta", dtype).parameters())
    if parameters > CPU_PARAMETERS:
        size = parameters * dtype.itemsize / 2**30
        raise ValueError(
            f"{name} has {parameters / 1e9:.1f} billion parameters and there is no GPU to run it on: {what} needs one "
            f"with {size:.0f} GiB for the weights in {str(dtype).removeprefix('torch.')}{way_out}"
        )
