"""The reference models of the scenes world: LLaVA in miniature, built from stock Hugging Face classes.

`scenes-llava` has LLaVA-1.5's geometry (24 x 24 = 576 visual tokens, features of the last but one block, MLP projector,
LLaMA decoder) at a size that a laptop runs; `scenes-nano` is its small sibling with 12 x 12 = 144 tokens. Their weights
are trained by `pretrain.py` and lie in `assets/<name>/` in the layout of the Hugging Face hub.
"""

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from jaxtyping import Float
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.processing_utils import ProcessorMixin

from diffprune_lab.scenes.language import CHINESE, all_texts
from diffprune_lab.scenes.world import PICTURE

ASSETS = Path(__file__).resolve().parent.parent / "assets"
SPECIALS = ("<pad>", "<s>", "</s>", "<image>")
PAD, START, END, IMAGE = range(len(SPECIALS))  # their token ids
IMAGE_MARK = {"image_token": "<image>"}
SHARD_BYTES = 15 * 2**20  # a committed file stays under 16 MiB
CHECKSUMS = "SHA256SUMS"

# Chinese has no spaces to cut at, so its common words are named, longest first.
_CHINESE_WORDS = {
    *(*CHINESE.shapes, *CHINESE.colors, *CHINESE.patterns, *CHINESE.places, *CHINESE.directions),
    *("东西", "什么", "颜色", "形状", "位置", "哪里", "哪种", "牌子", "多少", "回答", "字母"),
}
# One piece is one token wherever the vocabulary has it: the two role names, a word with its leading space, and below
# that single characters. Upper-case runs (signs, tags, choices) and numbers are therefore spelled letter by letter.
PIECES = (
    r"USER: ?| ?ASSISTANT:| ?[A-Z]?[a-z]+(?:'[a-z]+)?| ?[A-Z]| ?[0-9]| ?(?:"
    + "|".join(sorted(_CHINESE_WORDS, key=lambda word: (-len(word), word)))
    + r")| ?[^\sA-Za-z0-9]|\s"
)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ 'USER: ' }}{% endif %}"
    "{% if message['role'] == 'assistant' %}{{ 'ASSISTANT: ' }}{% endif %}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] if part['type'] in ('image', 'image_url') %}{{ '<image>\\n' }}{% endfor %}"
    "{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] }}{% endfor %}{% endif %}"
    "{% if message['role'] == 'assistant' %}{{ '</s>' }}{% else %}{{ ' ' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceSpec:
    """The sizes of one reference model."""

    patch: int
    vision_width: int
    vision_blocks: int
    vision_hidden: int
    text_width: int
    text_layers: int
    text_hidden: int
    head_width: int = 32

    @property
    def grid(self) -> int:
        """Visual tokens along one side of the picture."""
        return PICTURE // self.patch


SPECS = {
    "scenes-llava": ReferenceSpec(
        patch=8,
        vision_width=192,
        vision_blocks=8,
        vision_hidden=576,
        text_width=256,
        text_layers=6,
        text_hidden=512,
    ),
    "scenes-nano": ReferenceSpec(
        patch=16,
        vision_width=128,
        vision_blocks=6,
        vision_hidden=256,
        text_width=128,
        text_layers=4,
        text_hidden=256,
    ),
}


def reference_spec(name: str) -> ReferenceSpec:
    """The sizes of the reference model called `name`."""
    if name not in SPECS:
        raise ValueError(f"There is no reference model {name!r}: choose one of {', '.join(SPECS)}.")
    return SPECS[name]


def vocabulary(texts: Iterable[str]) -> dict[str, int]:
    """Token ids: the specials, the 256 bytes, then every piece of the texts in sorted order.

    Sorted rather than ranked by frequency: the ids then depend on which pieces there are and on nothing else.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = {piece for text in texts for piece in re.findall(PIECES, text)}
    # A word may open a text or follow another, and every letter and digit may.
    pieces |= {form for piece in pieces for form in (piece.strip(" "), f" {piece.strip(' ')}") if piece.isascii()}
    pieces |= {"USER: ", " ASSISTANT:"}
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    spelled = sorted({to_bytes.pre_tokenize_str(piece)[0][0] for piece in pieces} - set(alphabet))
    return {token: index for index, token in enumerate([*SPECIALS, *alphabet, *spelled])}


@cache
def _vocabulary_of(texts: Callable[[], Iterable[str]]) -> dict[str, int]:
    """The vocabulary of a world, made once: all its texts are tens of thousands."""
    return vocabulary(texts())


def build_tokenizer(
    texts: Callable[[], Iterable[str]] = all_texts, *, specials: Mapping[str, str] = IMAGE_MARK
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer in which every known piece is one token and everything else falls back to bytes.

    There is nothing to merge between a byte and a whole piece, so the merge list is empty and the model looks whole
    pieces up (`ignore_merges`, as LLaMA 3's tokenizer does): no training, the same tokenizer on every machine.

    Args:
        texts: Gives what the tokenizer is made for; default: all texts of the first world.
        specials: Marks for pictures by their names as attributes; those it does not know yet come last.
    """
    tokenizer = Tokenizer(models.BPE(vocab=_vocabulary_of(texts), merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", START)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        extra_special_tokens=dict(specials),
        padding_side="left",
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )


def build_processor(name: str, tokenizer: PreTrainedTokenizerFast) -> LlavaProcessor:
    """The stock LLaVA processor of the reference model called `name`."""
    spec = reference_spec(name)
    # The Pillow processor by name: without torchvision the general one falls back to it with a warning.
    images = CLIPImageProcessorPil(size={"shortest_edge": PICTURE}, crop_size={"height": PICTURE, "width": PICTURE})
    return LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=spec.patch,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,  # [CLS]
        chat_template=CHAT_TEMPLATE,
    )


def reference_config(spec: ReferenceSpec, tokenizer: PreTrainedTokenizerFast) -> LlavaConfig:
    """The stock LLaVA configuration with the sizes of `spec`."""
    vision = CLIPVisionConfig(
        hidden_size=spec.vision_width,
        intermediate_size=spec.vision_hidden,
        num_hidden_layers=spec.vision_blocks,
        num_attention_heads=spec.vision_width // spec.head_width,
        image_size=PICTURE,
        patch_size=spec.patch,
        projection_dim=spec.vision_width,
    )
    text = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=spec.text_width,
        intermediate_size=spec.text_hidden,
        num_hidden_layers=spec.text_layers,
        num_attention_heads=spec.text_width // spec.head_width,
        num_key_value_heads=spec.text_width // spec.head_width,
        max_position_embeddings=2048,
        initializer_range=0.05,  # about 1 / sqrt(width): the usual 0.02 is made for widths in the thousands
        pad_token_id=PAD,
        bos_token_id=START,
        eos_token_id=END,
    )
    return LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=IMAGE,
        image_seq_length=spec.grid**2,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        tie_word_embeddings=False,
    )


def grid_positions(grid: int, width: int) -> Float[Tensor, "N D"]:
    """Sines and cosines of the row and of the column of each of the `grid` x `grid` tokens, with deviation 0.35."""
    frequencies = math.pi * 0.5 ** torch.linspace(0.0, math.log2(grid), width // 4)  # from half a turn down to 1 / grid
    angles = torch.arange(grid)[:, None] * frequencies
    axis = torch.cat((angles.sin(), angles.cos()), dim=1) * 0.5  # [grid, D / 2]
    rows, columns = axis.repeat_interleave(grid, 0), axis.repeat(grid, 1)
    return torch.cat((rows, columns), dim=1)


def build_model(
    spec: ReferenceSpec, tokenizer: PreTrainedTokenizerFast, *, seed: int = 0
) -> LlavaForConditionalGeneration:
    """An untrained reference model in float32."""
    torch.manual_seed(seed)
    model = LlavaForConditionalGeneration(reference_config(spec, tokenizer))
    # Stock positions start 20 times smaller than the patches they are added to, and are then learned late.
    positions = model.model.vision_tower.embeddings.position_embedding
    with torch.no_grad():
        positions.weight[1:] = grid_positions(spec.grid, spec.vision_width)
    generation = model.generation_config
    generation.pad_token_id, generation.bos_token_id, generation.eos_token_id = PAD, START, END
    return model


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def save_reference(model: PreTrainedModel, processor: ProcessorMixin, folder: Path, *, card: str) -> None:
    """Writes the model in bfloat16, its processor, its card and the checksums of its shards."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {key: value.to(torch.bfloat16) for key, value in model.state_dict().items()}
    model.config.dtype = torch.bfloat16
    model.save_pretrained(folder, state_dict=state, max_shard_size=SHARD_BYTES)
    processor.save_pretrained(folder)
    (folder / "README.md").write_text(card, encoding="utf-8")
    for shard in folder.glob("*.safetensors"):
        shard.chmod(0o644)  # written through a private temporary file
    (folder / CHECKSUMS).write_text(checksums(folder))


def checksums(folder: Path) -> str:
    """A line with the checksum of every shard in the folder."""
    return "".join(f"{_checksum(shard)}  {shard.name}\n" for shard in sorted(folder.glob("*.safetensors")))


def check_shards(folder: Path) -> None:
    """Nothing where every shard named in the checksum file is whole, else a `ValueError` that names the file."""
    for line in (folder / CHECKSUMS).read_text().splitlines():
        digest, name = line.split()
        shard = folder / name
        if not shard.is_file() or _checksum(shard) != digest:
            state = "damaged" if shard.is_file() else "missing"
            raise ValueError(f"The weight file {shard} is {state}: restore it with `git checkout -- {shard}`.")


def load_reference(name: str, folder: Path | None = None) -> tuple[LlavaForConditionalGeneration, LlavaProcessor]:
    """The trained reference model in float32, ready to answer, and its processor.

    Args:
        name: `scenes-llava` or `scenes-nano`.
        folder: Where the weights lie, if not in the package.
    """
    reference_spec(name)
    model, tokenizer = load_shipped(name, folder, "runs/train_scenes_llava.sh")
    return model, build_processor(name, tokenizer)


def load_shipped(
    name: str, folder: Path | None, script: str
) -> tuple[LlavaForConditionalGeneration, PreTrainedTokenizerFast]:
    """A model whose weights ship with the lab, in float32 and ready to answer, and its tokenizer.

    Args:
        folder: Where the weights lie; default: in the package.
        script: What trains them, for the message where there are none.
    """
    folder = folder or ASSETS / name
    if not (folder / CHECKSUMS).is_file():
        raise ValueError(f"There are no weights of {name} in {folder}: train them with {script}.")
    check_shards(folder)
    loaded = LlavaForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, output_loading_info=True
    )
    assert isinstance(loaded, tuple)  # because of output_loading_info
    model, report = loaded
    wrong = {key: value for key, value in report.items() if value}
    if wrong:
        raise ValueError(f"The weights in {folder} do not fit the model they name: {wrong}.")
    model.config._name_or_path = name  # what a saved pruner names as its base: this name works on every machine
    return model.eval(), PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
