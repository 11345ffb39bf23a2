"""One method on one path over one batch, cut into the stages that are timed: vision, choice, splice, prefill, decode.

    probe = EagerProbe(vlm, batch)          # or FastProbe(vlm, batch) after vlm.compile()
    for name, stage in probe.stages.items():
        median_ms(stage, device)            # each stage alone, on inputs made beforehand
    probe.ttft()                            # all of it, from pixels on the device to token ids on the host

The stock model is the method `full` on the eager path: its `ttft` is the untouched model's own forward.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from diffprune.backbones.base import Batch
from diffprune.inside import loop
from diffprune.inside.state import LayerState
from diffprune.loading import load_base
from diffprune.methods.base import Kept, LayerPruner
from diffprune.methods.options import parse_method, split_methods
from diffprune.model import PrunedVLM
from diffprune.speed.flops import Layers, layer_tokens
from diffprune.speed.shapes import SHAPES, build, is_preset, require_gpu
from diffprune.types import VisualTokens


@runtime_checkable
class Probe(Protocol):
    """What both paths give to be measured.

    `stages` are calls to be timed one by one, in order: "encode", "pruner", "splice", "prefill" (what a path does not
    have apart is left out). `start` makes ready to decode, `step` decodes one more token.
    """

    stages: dict[str, Callable[[], object]]
    num_visual: int  # tokens of one picture
    num_kept: int  # those that the last layer of the language model holds
    num_columns: int  # of the first layer, padding included
    layers: Layers  # tokens of each layer of the language model, counted without padding
    kv_columns: Layers  # columns of the cache in each layer, padding included
    graphs: str | None  # the stages that are one CUDA graph each; None on the eager path

    def ttft(self) -> list[int]: ...

    def start(self) -> None: ...

    def step(self) -> None: ...

    def kv_bytes(self) -> int: ...

    def inner_pruner_ms(self) -> float | None: ...


# --- the model and what it is asked -----------------------------------------------------------------------------------


def load_subject(name: str, *, random_weights: bool, tiny: bool, device: str, dtype: torch.dtype) -> PrunedVLM:
    """The full model on the device: a preset at its real size with random weights, or whatever `load_base` loads."""
    if not random_weights:
        model, processor = load_base(name, dtype=dtype)
        return PrunedVLM(model.to(device), processor)
    if name not in SHAPES:
        what = "is known, but its size cannot be built with random weights yet" if is_preset(name) else "is not known"
        way_out = "take one of them, or leave --random-weights out to load it"
        raise ValueError(f"backbone {name!r} {what}; random weights are there for {', '.join(SHAPES)}: {way_out}")
    config, processor = SHAPES[name](tiny)
    require_gpu(name, config, dtype, device, what="measuring it", way_out="; give --size tiny or a smaller --backbone")
    return PrunedVLM(build(config, device, dtype), processor)


def with_method(subject: PrunedVLM, name: str, *, keep: int | float, dtype: torch.dtype) -> PrunedVLM:
    """The model with that method in the model's own precision; a scorer without weights is given random ones.

    Args:
        name: Of the method, its options in brackets.
    """
    backbone = subject.backbone
    built = parse_method(name).build(block=backbone.block, language=backbone.language)
    vlm = subject.with_method(built, keep=keep)
    randomise(vlm.method)
    vlm.method.to(dtype)
    return vlm


@torch.no_grad()
def randomise(method: nn.Module) -> None:
    """Numbers in place of zero weights: an untrained head gives every token the same logit, and ties need no sort."""
    generator = torch.Generator().manual_seed(0)
    for parameter in method.parameters():
        if parameter.ndim >= 2 and not bool(parameter.any()):
            drawn = torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5
            parameter.copy_(drawn)


def picture_size(text: str) -> tuple[int, int]:
    """(width, height) in pixels from "1344x896"."""
    sides = text.lower().split("x")
    if len(sides) != 2 or not all(side.isdigit() and int(side) > 0 for side in sides):
        raise ValueError(f"image {text!r} is no size; write width x height in pixels, for example 336x336")
    return int(sides[0]), int(sides[1])


def picture(seed: int, size: tuple[int, int]) -> Image.Image:
    """Random pixels, (width, height)."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8))


def make_batch(vlm: PrunedVLM, *, size: tuple[int, int], num_text: int, batch: int, seed: int = 0) -> Batch:
    """Prompts of one picture and exactly `num_text` text tokens each, on the device."""
    pictures = [picture(seed + row, size) for row in range(batch)]
    made = vlm.prepare(pictures, [""] * batch)
    ids = made.features["input_ids"]
    present = int((ids[0] != vlm.backbone.image_token_id).sum())
    missing = num_text - present
    if missing < 0:
        raise ValueError(f"{num_text} text tokens are fewer than the prompt's own {present}; give {present} or more")
    tail = torch.tensor(plain_ids(vlm)).to(ids)
    drawn = torch.randint(len(tail), (batch, missing), generator=torch.Generator().manual_seed(seed)).to(ids.device)
    features = {
        **made.features,
        "input_ids": torch.cat([ids, tail[drawn]], dim=1),
        "attention_mask": torch.cat([made.features["attention_mask"], ids.new_ones(batch, missing)], dim=1),
    }
    for key in vlm.backbone.sequence_features:
        if key in features:
            features[key] = torch.cat([features[key], features[key].new_zeros(batch, missing)], dim=1)
    return replace(made, features=features)


def plain_ids(vlm: PrunedVLM) -> list[int]:
    """Ids of ordinary tokens: nothing that opens or closes a picture or a text."""
    tokenizer = vlm.backbone.tokenizer
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder, vlm.backbone.image_token_id}
    return [index for index in range(len(tokenizer)) if index not in special]


# --- the model as it is -----------------------------------------------------------------------------------------------


class EagerProbe:
    """A method through the model's own modules, one after the other.

    Args:
        vlm: The model with the method around it.
        batch: Prompts of equal length, one picture each.
    """

    stages: dict[str, Callable[[], object]]
    layers: Layers
    kv_columns: Layers
    graphs: str | None = None

    def __init__(self, vlm: PrunedVLM, batch: Batch) -> None:
        self.vlm, self.batch = vlm, batch
        self.is_inside = vlm.method.is_inside
        self.cuts = TimedCuts(cast(LayerPruner, vlm.method)) if self.is_inside else None
        self.tokens = self._encode()
        self.counts = vlm.budget.counts(self.tokens.mask)
        if vlm.method.name == "full":
            self.counts = self.tokens.counts
        self.chosen = None if self.is_inside else self._choose()
        self.lm = self._splice()
        self.stages = {"encode": self._encode, "splice": self._splice, "prefill": self._prefill}
        if self.chosen is not None and vlm.method.name != "full":
            self.stages["pruner"] = self._choose
        self.num_columns = columns = self.lm.input_ids.shape[1]
        self.num_visual = int(self.tokens.counts[0])
        self.num_kept = int(self.lm.visual[0].sum())
        self.layers = self.kv_columns = columns
        if self.cuts is not None:
            num_layers = vlm.base.config.text_config.num_hidden_layers
            stages = self.cuts.stages(num_layers, self.num_visual, int(self.counts[0]))
            num_text = columns - self.num_visual
            self.layers = self.kv_columns = layer_tokens(stages, num_layers, self.num_visual, num_text)
            self.num_kept = self.layers[-1] - num_text

    @torch.inference_mode()
    def _encode(self) -> VisualTokens:
        tokens = self.vlm.encode(self.batch)
        assert tokens is not None
        return tokens

    @torch.inference_mode()
    def _choose(self) -> Kept:
        """Features of the tokens that stay, and their indices."""
        return self.vlm.rule.deploy(self.tokens, self.counts)

    @torch.inference_mode()
    def _splice(self) -> Any:
        """Projector, embeddings and positions."""
        return self.vlm.splice(self.batch, self.tokens, self.chosen or self._choose())

    @torch.inference_mode()
    def _prefill(self) -> tuple[Tensor, Any]:
        """First token of each prompt and the caches."""
        base = self.vlm.base
        if self.cuts is not None:
            hidden, cache = loop.prefill(self.vlm.backbone, self.lm, self.cuts, self.counts)
        else:
            lm = self.lm
            out = base.model(
                inputs_embeds=lm.inputs_embeds,
                attention_mask=lm.attention_mask,
                position_ids=lm.position_ids,
                use_cache=True,
                **lm.extra,
            )
            hidden, cache = out.last_hidden_state[:, -1], out.past_key_values
        return base.lm_head(hidden).argmax(-1), cache

    @torch.inference_mode()
    def ttft(self) -> list[int]:
        """First token of each prompt, on the host."""
        if self.vlm.method.name == "full":
            out = self.vlm.base(**self.batch.features, use_cache=True, logits_to_keep=1)
            return out.logits[:, -1].argmax(-1).tolist()
        self.tokens = self._encode()
        if not self.is_inside:
            self.chosen = self._choose()
        self.lm = self._splice()
        return self._prefill()[0].tolist()

    def start(self) -> None:
        self.token, self.cache = self._prefill()
        positions = self.lm.position_ids
        last = positions[..., -1:] if positions.ndim == 2 else positions.amax((0, 2))[None, :, None].expand(3, -1, -1)
        self.position, self.mask = last, self.lm.attention_mask

    @torch.inference_mode()
    def step(self) -> None:
        base = self.vlm.base
        embeds = base.get_input_embeddings()(self.token[:, None])
        if self.cuts is not None:
            hidden = loop.step(self.vlm.backbone, embeds, self.cache)
        else:
            self.position = self.position + 1
            self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.mask), 1)], dim=1)
            out = base.model(
                inputs_embeds=embeds,
                attention_mask=self.mask,
                position_ids=self.position,
                past_key_values=self.cache,
                use_cache=True,
            )
            hidden = out.last_hidden_state[:, -1]
        self.token = base.lm_head(hidden).argmax(-1)

    def kv_bytes(self) -> int:
        """Bytes that the cache holds after prefill, read off its tensors."""
        _, cache = self._prefill()
        cache = cache.keys_values if self.cuts is not None else cache
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)

    def inner_pruner_ms(self) -> float | None:
        """Time of the choices inside the last prefill; None where the method chooses before the language model."""
        return None if self.cuts is None else self.cuts.take_ms()


class TimedCuts(LayerPruner):
    """A method inside the language model that notes how long its choices take, and is the method in all else."""

    def __init__(self, method: LayerPruner) -> None:
        super().__init__(method.options, block=method.block)
        self.method = method
        self.spans: list[tuple[Any, Any]] = []

    @property
    def positions(self) -> str:
        return self.method.positions

    def stages(self, num_layers: int, num_visual: int, keep: int) -> dict[int, int]:
        return self.method.stages(num_layers, num_visual, keep)

    def select_at(self, state: LayerState, k: Tensor) -> Any:
        first = self._now(state.hidden)
        chosen = self.method.select_at(state, k)
        self.spans.append((first, self._now(state.hidden)))
        return chosen

    def take_ms(self) -> float:
        """Milliseconds of all choices since the last call."""
        spans, self.spans = self.spans, []
        if not spans or isinstance(spans[0][0], float):
            return sum(last - first for first, last in spans) * 1e3
        torch.cuda.synchronize()
        return sum(first.elapsed_time(last) for first, last in spans)

    @staticmethod
    def _now(like: Tensor) -> Any:
        """A point in time: an event in the GPU's queue, which stops nothing, or the clock."""
        if not like.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


# --- the fast path ----------------------------------------------------------------------------------------------------


class FastProbe:
    """A method on the compiled path; `vlm.compile()` has been called.

    Args:
        vlm: The compiled model.
        batch: Prompts of equal length, one picture each.
    """

    stages: dict[str, Callable[[], object]]
    layers: Layers
    kv_columns: Layers
    graphs: str | None

    def __init__(self, vlm: PrunedVLM, batch: Batch) -> None:
        self.vlm, self.batch = vlm, batch
        self.fast: Any = vlm.fast
        self.run = run = self.fast.prepare(batch)
        self.is_inside = vlm.method.is_inside
        stages = ("encode", "prune", "splice", "prefill")
        for name in stages:  # each needs what the one before it left
            getattr(self.fast, name)(run)
        names = {"encode": "encode", "splice": "splice", "prefill": "prefill"}
        if not self.is_inside and vlm.method.name != "full":
            names["pruner"] = "prune"
        self.stages = {name: partial(getattr(self.fast, stage), run) for name, stage in names.items()}
        eager = EagerProbe(vlm, batch)  # the same method's token counts, without padding
        self.num_visual, self.num_kept, self.layers = eager.num_visual, eager.num_kept, eager.layers
        self.num_columns, self.kv_columns = run.bucket.length, list(run.bucket.columns)
        captured: dict[str, bool] = self.fast.captured(run)
        self.graphs = ", ".join(name for name, is_graph in captured.items() if is_graph) or "none"

    def ttft(self) -> list[int]:
        return self.fast.ttft(self.batch).tolist()

    def start(self) -> None:
        for name in ("encode", "prune", "splice", "prefill"):
            getattr(self.fast, name)(self.run)

    def step(self) -> None:
        self.fast.decode(self.run)

    def kv_bytes(self) -> int:
        """Bytes of the static cache of this request's bucket, read off its tensors."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.run.bucket.cache)

    def inner_pruner_ms(self) -> float | None:
        return None  # one graph with the prefill


def check_methods(text: str) -> list[str]:
    """The methods of a comma-separated text, each once; an error where one, or an option of it, is not known."""
    wanted = split_methods(text)
    if not wanted:
        raise ValueError("no method was named; give some, for example --methods full,diffprune")
    for name in wanted:
        parse_method(name)
    return wanted
