"""Named sizes of a family, and how one is described without a download: its configuration and a processor.

Speed depends on shapes alone, so a model that was never downloaded can be measured with random weights.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

CHARACTERS = 4096  # more than any prompt of a measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A real size of a family.

    Args:
        hub_id: Where its weights are.
        num_visual: How many visual tokens a picture gives, in words.
        note: What else a reader should know.
        describe: Configuration and processor as the hub's files say; True asks for the same kind of model small enough
            for a CPU. None where only the hub has them.
    """

    hub_id: str
    num_visual: str
    note: str = ""
    describe: Callable[[bool], tuple[Any, Any]] | None = None


def byte_tokenizer(image_token: str, *extra: str, **named: str) -> Any:
    """Every byte is one token: enough to run a model whose weights are random.

    Args:
        extra: Further special tokens.
        named: Those that the tokenizer is to hold by a name of their own, which some processors ask for.
    """
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
        extra_special_tokens={"image_token": image_token, **named},
    )
    fast.add_tokens(list(extra), special_tokens=True)  # else they are split into bytes
    return fast


def chat(image: str) -> str:
    """USER: <image>\\nquestion ASSISTANT:"""
    return (
        "{% for m in messages %}USER: {% for c in m['content'] %}{% if c['type'] == 'image' %}" + image + "\n"
        "{% elif c['type'] == 'text' %}{{ c['text'] }}{% endif %}{% endfor %}{% endfor %} ASSISTANT:"
    )


def end_tokens(tokenizer: Any) -> dict[str, Any]:
    """Ids of the special tokens, as a text config names them."""
    return {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }


# Towers and language models that several families are made of --------------------------------------------------------

SMALL: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
SMALL_VOCABULARY = 300
_LLAMA: dict[str, dict[str, int]] = {
    "7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
    "13b": {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40},
}
_CLIP_LARGE = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}


def clip_and_llama(
    configuration: Any, processor: Any, images: Any, size: str, tiny: bool, **more: Any
) -> tuple[Any, Any]:
    """CLIP's large tower at 336 pixels with a LLaMA, as that kind of model and processor."""
    from transformers import CLIPVisionConfig, LlamaConfig

    tokenizer = byte_tokenizer("<image>")
    sizes: dict[str, Any] = SMALL if tiny else _LLAMA[size]
    text = LlamaConfig(
        **sizes,
        vocab_size=SMALL_VOCABULARY if tiny else 32064,
        max_position_embeddings=4096,
        **end_tokens(tokenizer),
    )
    tower: dict[str, Any] = SMALL if tiny else _CLIP_LARGE
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
