"""One request cut into the stages that are timed: vision, choice, splice, prefill, decode; on either path.

    request = EagerRequest(vlm, batch)      # or FastRequest(vlm, batch) after vlm.compile()
    for name, stage in request.stages.items():
        median_ms(stage, device)            # each stage alone, on inputs made beforehand
    request.ttft()                          # all of it, from pixels on the device to token ids on the host

The stock model is the method `full` on the eager path: its `ttft` is the untouched model's own forward.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from diffprune.backbones.prompts import Batch
from diffprune.inside import loop
from diffprune.inside.state import LayerState
from diffprune.methods.base import Kept, LayerPruner
from diffprune.model import PrunedVLM
from diffprune.speed.flops import Layers, layer_tokens
from diffprune.types import VisualTokens


@runtime_checkable
class TimedRequest(Protocol):
    """A request of either path, to be measured.

    `stages` are calls to be timed one by one, in order: "encode", "pruner", "splice", "prefill" (without
    those that a path does not have apart). `start` makes ready to decode, `step` decodes one more token.
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


# --- the model as it is -----------------------------------------------------------------------------------------------


class EagerRequest:
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
        self.cuts = TimedLayerPruner(cast(LayerPruner, vlm.method)) if self.is_inside else None
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
            out = self.vlm.backbone.prefill(self.lm, use_cache=True)
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


class TimedLayerPruner(LayerPruner):
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


class FastRequest:
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
        eager = EagerRequest(vlm, batch)  # the same method's token counts, without padding
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
