"""Qwen3-VL: as Qwen2-VL, with DeepStack: features of several vision layers are added in the first decoder layers.

Those features are further planes of the same groups: kept with the same indices, merged by their own mergers after the
choice, and added where the kept tokens stand.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from threading import RLock
from typing import Any, ClassVar, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers.vision_utils import get_vision_interpolation_indices_and_weights

from diffprune.backbones._qwen_vision import QwenVL
from diffprune.backbones.base import Preset
from diffprune.registry import BACKBONES
from diffprune.types import LMInputs

NUM_VISUAL = "1 per 32 x 32 pixels"
DEEPSTACK = ("visual_pos_masks", "deepstack_visual_embeds")  # what the language model's forward calls them


@BACKBONES.register("qwen3_vl")
class Qwen3VL(QwenVL):
    family: ClassVar[str] = "qwen3_vl"
    unserved: ClassVar[str | None] = (
        "features of its pictures are added in the decoder as well (DeepStack), and the engine's Transformers backend "
        "does not hand them on"
    )
    presets: ClassVar[dict[str, Preset]] = {
        "qwen3-vl-2b": Preset(hub_id="Qwen/Qwen3-VL-2B-Instruct", num_visual=NUM_VISUAL),
        "qwen3-vl-4b": Preset(hub_id="Qwen/Qwen3-VL-4B-Instruct", num_visual=NUM_VISUAL),
        "qwen3-vl-8b": Preset(hub_id="Qwen/Qwen3-VL-8B-Instruct", num_visual=NUM_VISUAL),
    }

    def embed_patches(self, pixels: Tensor, grid: Int[Tensor, "B 3"]) -> Float[Tensor, "P W"]:
        """Patches with the learned position grid, resampled to each picture's size."""
        tower = self.tower
        hidden = tower.patch_embed(pixels)
        corners, weights = get_vision_interpolation_indices_and_weights(
            grid,
            num_grid_per_side=tower.num_grid_per_side,
            mode=tower.interpolation_mode,
            align_corners=tower.interpolation_align_corners,
            spatial_merge_size=tower.spatial_merge_size,
        )
        places = (tower.pos_embed(corners) * weights[..., None]).sum(1)
        return hidden + places.to(hidden.dtype)

    # ------------------------------------------------------------------------------------- DeepStack

    @property
    def plane_blocks(self) -> tuple[int, ...]:
        return tuple(self.tower.deepstack_visual_indexes)

    def plane_inputs(
        self, planes: Sequence[Float[Tensor, "I K D"]], source: Int[Tensor, " S"], visual: Bool[Tensor, "B T"]
    ) -> dict[str, object]:
        merged = [self.merge(merger, x) for merger, x in zip(self.tower.deepstack_merger_list, planes, strict=True)]
        return dict(zip(DEEPSTACK, (visual, [plane.flatten(0, 1)[source] for plane in merged]), strict=True))

    def __init__(self, model: nn.Module, processor: Any) -> None:
        super().__init__(model, processor)
        self.alone = Alone()

    def layer_additions(self, lm: LMInputs) -> list[Float[Tensor, "B T L"]]:
        if DEEPSTACK[0] not in lm.extra:
            return []
        visual, planes = (lm.extra[key] for key in DEEPSTACK)
        empty = torch.zeros_like(lm.inputs_embeds)
        return [empty.masked_scatter(visual[..., None], plane.to(empty.dtype)) for plane in planes]  # type: ignore[index,union-attr]

    def prefill(self, lm: LMInputs, *, use_cache: bool) -> Any:
        # The outer model hands these two on by itself, and only with pixels; the language model takes them as they are.
        with self.alone:
            return self.language_model(
                inputs_embeds=lm.inputs_embeds,
                attention_mask=lm.attention_mask,
                position_ids=lm.position_ids,
                use_cache=use_cache,
                **{key: lm.extra[key] for key in DEEPSTACK if key in lm.extra},
            )

    def fill(self, lm: LMInputs, cache: Any, start: int) -> None:
        end = lm.input_ids.shape[1] - 1
        extra: dict[str, Any] = {}
        if DEEPSTACK[0] in lm.extra:
            visual, planes = cast(Any, [lm.extra[key] for key in DEEPSTACK])
            first, count = (int(visual[:, part].sum()) for part in (slice(0, start), slice(start, end)))
            if count:
                extra = dict(
                    zip(DEEPSTACK, (visual[:, start:end], [p[first : first + count] for p in planes]), strict=True)
                )
        with self.alone:
            self.language_model(
                inputs_embeds=lm.inputs_embeds[:, start:end],
                attention_mask=lm.attention_mask[:, :end],
                position_ids=lm.position_ids[..., start:end],
                past_key_values=cache,
                use_cache=True,
                **extra,
            )

    def go_on(self, lm: LMInputs, cache: Any, **kwargs: Any) -> Any:
        with self.alone:
            return super().go_on(lm, cache, **kwargs)

    def run_generate(self, lm: LMInputs, **kwargs: Any) -> Any:
        with self.alone:
            if DEEPSTACK[0] not in lm.extra:
                return super().run_generate(lm, **kwargs)
            visual, planes = (lm.extra[key] for key in DEEPSTACK)
            plain = {key: value for key, value in lm.extra.items() if key not in DEEPSTACK}
            with deepstack_in_prefill(self.language_model, visual, planes):  # type: ignore[arg-type]
                return super().run_generate(replace(lm, extra=plain), **kwargs)


class Alone:
    """A lock of one model: the hook of one thread's prompt must not be on the module when another's goes through it."""

    def __init__(self) -> None:
        self.lock = RLock()

    def __reduce__(self) -> tuple[type["Alone"], tuple[()]]:
        return Alone, ()  # a copy of the model has its own

    def __enter__(self) -> None:
        self.lock.acquire()

    def __exit__(self, *error: object) -> None:
        self.lock.release()


@contextmanager
def deepstack_in_prefill(
    language_model: nn.Module, visual: Bool[Tensor, "B T"], planes: Sequence[Float[Tensor, "S L"]]
) -> Iterator[None]:
    """While it is open, the next pass through the language model adds `planes` where visual tokens stand.

    The stock `generate` passes DeepStack features on only where it encodes the pixels itself. A filled cache handed to
    it would do for greedy decoding, but then cache kinds, beams and returned sequences would have to be made by hand;
    a hook on this one module leaves all of that to `generate`. It takes itself off at the first pass, which is the
    prefill, so that decoding steps (which may be compiled) run the untouched module, and is off after an error too.
    """

    def add(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        handle.remove()
        batch, length = kwargs["inputs_embeds"].shape[:2]
        copies = batch // len(visual)  # beams and returned sequences repeat each prompt in place
        if length != visual.shape[1]:
            raise ValueError(
                f"decoding began with {length} of the prompt's {visual.shape[1]} tokens; Qwen3-VL adds visual features "
                "in one pass over the whole prompt, so do without assisted decoding"
            )
        counts = visual.sum(-1).tolist()
        repeated = [torch.cat([rows for rows in plane.split(counts) for _ in range(copies)]) for plane in planes]
        given = zip(DEEPSTACK, (visual.repeat_interleave(copies, 0), repeated), strict=True)
        return args, {**kwargs, **dict(given)}

    handle = language_model.register_forward_pre_hook(add, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
