"""scenes-llava-next: LLaVA-NeXT in miniature, on the tower of scenes-llava.

    python -m diffprune_lab.pretrain.next --stage language --out out/next
    python -m diffprune_lab.pretrain.next --stage language --init out/next --round 1 --out out/next-1
    python -m diffprune_lab.pretrain.next --stage package --init out/next-1 --logs out/next --out out/scenes-llava-next

A scene is shown twice as large, 384 x 384 px, and cut into an overview of 192 px and 2 x 2 tiles of 192 px: 5 x 576 =
2,880 visual tokens, and a newline behind each of the 48 rows of the tiles. Tower and tokenizer are scenes-llava's own,
untouched; the projector and the decoder start from its weights and are tuned as it was tuned, with visual prefixes of
any length and make-up (`prefixes.py`), taken from the overview, from the tiles or from both. No pruner chooses them.

A run saves what it trains (projector, newline, decoder) and not the tower. `package` joins the two to a folder in the
hub's layout, for `diffprune train` and `diffprune eval`; its `scenes.json` says how large the pictures are.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor, nn
from transformers import (
    LlavaForConditionalGeneration,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaNextImageProcessorPil,
    LlavaNextProcessor,
    PreTrainedTokenizerFast,
)

from diffprune_lab.pretrain import passes, prefixes, trainer, turns
from diffprune_lab.pretrain.feed import Batch
from diffprune_lab.pretrain.llava import LanguageRun
from diffprune_lab.pretrain.package import is_tower, read_log, read_state, training_report, write_state
from diffprune_lab.pretrain.trainer import Family, Settings
from diffprune_lab.scenes import reference
from diffprune_lab.scenes.sizes import SIZES_FILE, resize
from diffprune_lab.scenes.world import PICTURE

NAME, BASE = "scenes-llava-next", "scenes-llava"
TILES = 2  # along each side of the picture
LARGE = TILES * PICTURE
POSITIONS = 4096  # 2,928 placeholders and the text behind them

# How a prefix is divided between the overview and the tiles, drawn beside the rule: how often, how far the priorities
# of whole tiles are moved apart (those of a rule lie within about 2), and whether the tiles are moved as one.
DIVISIONS = {
    "even": (45, 0.0, True),
    "leaning": (15, 0.4, True),
    "uneven": (15, 0.4, False),
    "one view first": (20, 10.0, True),
    "tile by tile": (5, 10.0, False),
}


# The model -----------------------------------------------------------------------------------------------------------


def next_config(base: LlavaForConditionalGeneration) -> LlavaNextConfig:
    """The stock LLaVA-NeXT configuration with the parts of `base`."""
    config: Any = base.config
    text = config.text_config
    rope = {**text.rope_parameters, "rope_theta": stretched_base(text.rope_parameters["rope_theta"], text.head_dim)}
    return LlavaNextConfig(
        vision_config=config.vision_config.to_dict(),
        text_config={**text.to_dict(), "max_position_embeddings": POSITIONS, "rope_parameters": rope},
        image_token_index=reference.IMAGE,
        image_grid_pinpoints=[[LARGE, LARGE]],
        vision_feature_layer=config.vision_feature_layer,
        vision_feature_select_strategy="default",
        tie_word_embeddings=False,
    )


def stretched_base(base: float, head_width: int) -> float:
    """The base of rotary positions with which a decoder reads prompts `1 + TILES**2` times as long as it has learned.

    The slowest angle grows as many times slower and the fastest stays (known as NTK-aware scaling): neighbouring words
    stand as they did, and the far end of the prompt is no farther than it was.
    """
    return base * (1 + TILES**2) ** (head_width / (head_width - 2))


def build_next(
    base: LlavaForConditionalGeneration, tokenizer: PreTrainedTokenizerFast
) -> LlavaNextForConditionalGeneration:
    """The model with the weights of `base`; its newline starts as the one of the text."""
    model = LlavaNextForConditionalGeneration(next_config(base))
    missing, unexpected = model.load_state_dict(base.state_dict(), strict=False)
    assert missing == ["model.image_newline"] and not unexpected, (missing, unexpected)
    (newline,) = tokenizer.encode("\n", add_special_tokens=False)
    with torch.no_grad():
        model.model.image_newline.copy_(model.model.language_model.embed_tokens.weight[newline])
    generation = model.generation_config
    generation.pad_token_id, generation.bos_token_id, generation.eos_token_id = (
        reference.PAD,
        reference.START,
        reference.END,
    )
    return model.eval()


def build_processor(tokenizer: PreTrainedTokenizerFast, *, patch: int) -> LlavaNextProcessor:
    """The stock LLaVA-NeXT processor."""
    tokenizer.model_max_length = POSITIONS
    images = LlavaNextImageProcessorPil(
        size={"shortest_edge": PICTURE},
        crop_size={"height": PICTURE, "width": PICTURE},
        image_grid_pinpoints=[[LARGE, LARGE]],
    )
    return LlavaNextProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=patch,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,  # [CLS]
        chat_template=reference.CHAT_TEMPLATE,
    )


def geometry(model: LlavaNextForConditionalGeneration) -> tuple[int, int]:
    """(patch, side): pixels along one side of a patch, and patches along one side of a tile."""
    vision: Any = model.config.vision_config
    return vision.patch_size, vision.image_size // vision.patch_size


def count_tokens(model: LlavaNextForConditionalGeneration) -> int:
    """Visual tokens of a picture: those of the overview and of the tiles."""
    return (1 + TILES**2) * geometry(model)[1] ** 2


# What it sees --------------------------------------------------------------------------------------------------------


def cut_tiles(pixels: UInt8[Tensor, "B 3 H W"]) -> UInt8[Tensor, "B X 3 H W"]:
    """The overview and the tiles of each scene, as the stock processor cuts them from the picture twice as large."""
    height, width = pixels.shape[-2:]
    large = resize(pixels, TILES * height, TILES * width)
    overview = resize(large, height, width, "bicubic")
    tiles = large.unfold(2, height, height).unfold(3, width, width)  # [B, 3, 2, 2, H, W]
    return torch.cat((overview[:, None], tiles.flatten(2, 3).transpose(1, 2)), dim=1)


def join_tiles(features: Float[Tensor, "B X P D"]) -> Float[Tensor, "B N D"]:
    """The tokens in the order of the prompt: the overview's, then those of all tiles row by row."""
    side = round(features.shape[2] ** 0.5)
    tiles = features[:, 1:].unflatten(1, (TILES, TILES)).unflatten(3, (side, side))  # [B, 2, 2, side, side, D]
    return torch.cat((features[:, 0], tiles.transpose(2, 3).flatten(1, 4)), dim=1)


def token_places(side: int, device: torch.device) -> prefixes.Places:
    """Where the tokens of the overview and those of the tiles stand, each on the grid of their own view."""
    views = (prefixes.raster(size, size, device) for size in (side, TILES * side))
    return prefixes.Places(*(torch.cat(parts) for parts in zip(*views, strict=True)))


def token_tiles(side: int, device: torch.device) -> Int[Tensor, " N"]:
    """The tile each token is of; 0 is the overview."""
    places = prefixes.raster(TILES * side, TILES * side, device)
    tiles = 1 + places.row // side * TILES + places.column // side
    return torch.cat((tiles.new_zeros(side**2), tiles))


def items_of(batch: Batch, patch: int) -> Int[Tensor, "B N"]:
    """The item each token looks at; what a token of a tile sees is half as wide as what one of the overview does."""
    looked_at = (
        prefixes.item_of_tokens(batch["owner"], batch["tagged"], size, least=max(1, size * size // 16))[0]
        for size in (patch, patch // TILES)
    )
    return torch.cat(tuple(looked_at), dim=1)


# Which of it stays ---------------------------------------------------------------------------------------------------


def draw_division(
    batch: int, tiles: Int[Tensor, " N"], generator: torch.Generator | None = None
) -> Float[Tensor, "B N"]:
    """What is added to the priorities of each row's tokens, tile by tile, by one of `DIVISIONS`."""
    device = tiles.device
    often, apart, as_one = (
        torch.tensor(column, dtype=torch.float32, device=device) for column in zip(*DIVISIONS.values(), strict=True)
    )
    drawn = torch.multinomial(often, batch, replacement=True, generator=generator)
    moved = torch.rand(batch, 1 + TILES**2, generator=generator, device=device) * apart[drawn, None]
    views = torch.cat((moved[:, :1], moved[:, 1:2].expand(-1, TILES**2)), dim=1)
    return torch.where(as_one[drawn, None] > 0, views, moved)[:, tiles]


def place_prefix(
    visual: Float[Tensor, "B K L"], keep: Int[Tensor, "B K"], newline: Float[Tensor, " L"], *, side: int
) -> tuple[Float[Tensor, "B S L"], Int[Tensor, "B S"], Bool[Tensor, "B S"]]:
    """(states, slots, real): kept tokens and the newlines of the rows that keep one, in the order of the prompt.

    A row's newline stays where the row keeps a token, as `PrunedVLM` has it by default. All pictures of the batch have
    as many states: those of newlines that went stand at the end and are not real.

    Args:
        visual: The kept tokens in the space of the language model.
        keep: Which they are.
        newline: The state of a newline.
        side: Tokens along one side of a tile.
    """
    rows = columns = TILES * side
    overview = side**2
    row = torch.div(keep - overview, columns, rounding_mode="floor")
    slots = keep + row.clamp(min=0)  # behind each row stands a newline
    has_row = torch.zeros(len(keep), rows + 1, dtype=torch.bool, device=keep.device)
    has_row = has_row.scatter(1, torch.where(row < 0, rows, row), True)[:, :rows]
    last = overview + rows * (columns + 1)  # past all placeholders
    ends = overview + columns + torch.arange(rows, device=keep.device) * (columns + 1)
    slots = torch.cat((slots, torch.where(has_row, ends, last)), dim=1)
    slots, order = slots.sort(dim=1)
    states = torch.cat((visual, newline.to(visual.dtype).expand(len(keep), rows, -1)), dim=1)
    return states.gather(1, order[:, :, None].expand_as(states)), slots, slots < last


def answer_loss(
    model: LlavaNextForConditionalGeneration,
    features: Float[Tensor, "B N D"],
    keep: Int[Tensor, "B K"],
    batch: Batch,
    start_ids: Int[Tensor, " S"],
    *,
    side: int,
    parts: turns.LayerParts = turns.PLAIN,
) -> tuple[Float[Tensor, ""], Int[Tensor, "B T"], turns.TurnLayout]:
    """(loss, guesses, layout), as `passes.answer_loss` gives them, with the newlines of LLaVA-NeXT.

    Args:
        features: Visual features of all tokens, in the order of the prompt.
        keep: The tokens that stay, at their original positions.
        batch: The packed turns.
        start_ids: Token ids in front of the picture.
        side: Tokens along one side of a tile.
        parts: The parts of a decoder layer, as they are or compiled.
    """
    return passes.answer_loss(
        model,
        features,
        keep,
        batch,
        start_ids,
        place=partial(place_prefix, newline=model.model.image_newline, side=side),
        placeholders=features.shape[1] + TILES * side,
        parts=parts,
    )


# Training ------------------------------------------------------------------------------------------------------------


class NextRun(LanguageRun):
    """The projector, the newline and the language model learn to answer from overview and tiles.

    Args:
        settings: Of the run; `init` is a folder that an earlier run of this kind wrote, `base` the folder of the
            packaged scenes-llava, if not the one that comes with the package.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.patch, self.side = geometry(self.model)
        self.places, self.tiles = token_places(self.side, self.device), token_tiles(self.side, self.device)

    def read_spec(self) -> Any:
        return reference.reference_spec(BASE)

    def build(self, tokenizer: PreTrainedTokenizerFast) -> nn.Module:
        return load_next(tokenizer, self.settings.init, self.settings.base)

    def count_tokens(self) -> int:
        return count_tokens(self.model)

    def features(self, batch: Batch, block_function: Any) -> tuple[Tensor, Tensor]:
        tiles = cut_tiles(batch["pixels"])
        with torch.no_grad():
            states, _ = passes.tower_states(self.tower, tiles.flatten(0, 1), last=False, block_function=block_function)
        return join_tiles(states[:, 1:].unflatten(0, tiles.shape[:2])), items_of(batch, self.patch)

    def priorities(
        self, items: Tensor, features: Tensor, rules: Tensor, generator: torch.Generator
    ) -> Float[Tensor, "B N"]:
        return prefixes.priorities(items, features, rules, generator, places=self.places)

    def draw_priorities(self, items: Tensor, features: Tensor) -> Float[Tensor, "B N"]:
        return super().draw_priorities(items, features) + draw_division(len(items), self.tiles, self.generator)

    def answer(
        self, features: Tensor, keep: Tensor, batch: Batch, parts: turns.LayerParts = turns.PLAIN
    ) -> tuple[Tensor, Tensor, turns.TurnLayout]:
        return answer_loss(self.model, features, keep, batch, self.start_ids, side=self.side, parts=parts)

    def run(self) -> None:
        """Trains and saves."""
        self.train([self.model])  # the tower is frozen

    def save(self) -> None:
        write_state(trained_part(self.model), self.settings.out)


def trained_part(model: nn.Module) -> dict[str, Tensor]:
    """The weights that are not scenes-llava's own."""
    return {name: value for name, value in model.state_dict().items() if not is_tower(name)}


def load_next(
    tokenizer: PreTrainedTokenizerFast, init: Path | None, base: Path | None = None
) -> LlavaNextForConditionalGeneration:
    """The model from what a run wrote, or as it starts where there is no run; the tower is that of scenes-llava.

    Args:
        init: Folder of a run.
        base: Folder of the packaged scenes-llava, if not the one that comes with the package.
    """
    model = build_next(reference.load_reference(BASE, base)[0], tokenizer)
    if init is None:
        return model
    state = read_state(init)
    odd = sorted(state.keys() ^ trained_part(model).keys())
    if odd:
        raise ValueError(f"{init} holds no weights of {NAME}: the first that is missing or unknown is {odd[0]}.")
    model.load_state_dict(state, strict=False)
    return model


def package(name: str, weights: Path, earlier: list[Path], out: Path, base: Path | None = None) -> None:
    """Writes tower and trained weights in the hub's layout, with the processor, a card and the size of the pictures.

    Args:
        name: Of the model.
        weights: Folder of the last run.
        earlier: Folders of the runs before it, for the card.
        out: Where the files go.
        base: Folder of the packaged scenes-llava, if not the one that comes with the package.
    """
    tokenizer = reference.build_tokenizer()
    model = load_next(tokenizer, weights, base)
    card = model_card(name, model, [read_log(folder) for folder in (weights, *earlier)])
    model.save_pretrained(out)
    build_processor(tokenizer, patch=geometry(model)[0]).save_pretrained(out)
    (out / SIZES_FILE).write_text(json.dumps({"sizes": str(LARGE)}) + "\n", encoding="utf-8")
    (out / "README.md").write_text(card, encoding="utf-8")


def model_card(name: str, model: LlavaNextForConditionalGeneration, runs: list[list[dict]]) -> str:
    """The card of the model; every figure is read from the logs of its runs, the last one first."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return f"""# {name}

A LLaVA-NeXT in miniature on the tower of {BASE}: {parameters:,} parameters, {count_tokens(model):,} visual tokens of a
{LARGE} px picture (an overview and {TILES} x {TILES} tiles). It knows the procedural scenes of diffprune and nothing
else.

Prompt: `USER: <image>\\n{{question}} ASSISTANT:`

{training_report("diffprune_lab.pretrain.next", runs)}"""


NEXT = Family(
    names=(NAME,),
    stages={"language": NextRun},
    package=package,
    description=__doc__ or "",
    defaults={"minutes": 6.0, "batch": 64, "workers": 4, "lr": 2e-4, "full": 0.2},
    starts_from=BASE,
    first_round=50,  # the rounds before it are those of scenes-llava: no scene is seen again
)


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    trainer.main(NEXT, arguments)


if __name__ == "__main__":
    main()
