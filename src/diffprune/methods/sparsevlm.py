"""SparseVLM: keep the visual tokens that the prompt's most picture-like words attend to, and recycle some of the rest.

Version 1.5 merges the best of what is dropped into a few cluster means. SparseVLM+ (2.0) recycles nothing; it corrects
the attention for distance and reads the heads that look at the picture most. No training.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diffprune.inside.budget import average_stages, check_cut, geometric_stages, scale_layers
from diffprune.inside.reader import columns_of
from diffprune.inside.state import Cut, LayerState, Prompt
from diffprune.methods.base import Card, LayerPruner, check_choices
from diffprune.ops import hard_mask, hard_topk, take_tokens
from diffprune.registry import METHODS

LAYERS = (2, 6, 15)  # of 32; tokens are dropped after them
RANK_LAYERS = (2, 6, 15, 19)  # of the first release, with the rank rule
LISTS: dict[str, dict[int, tuple[int, ...]]] = {  # tokens kept after those layers, by budget, of 576
    "1.5": {192: (300, 200, 110), 128: (303, 110, 36), 96: (238, 48, 26), 64: (66, 30, 17)},
    "plus": {192: (300, 200, 118), 128: (238, 108, 60), 96: (246, 54, 28), 64: (66, 34, 20)},
}
QUERY_CHUNK = 64  # raters whose attention rows are held at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseVLMOptions:
    """Args:
    version: "1.5", or "plus" for SparseVLM+.
    layers: Decoder layers (from 0) after which tokens are dropped. Default: 2, 6 and 15 of 32, and the same depth of
        other models.
    budget: "exact" leaves K tokens after the last cut, merged ones counted, every cut the same share of what is there;
        "average" makes K the mean over all layers; "rank" keeps as many as the rank of the raters' attention says
        (first release; K is not used, but where K is all nothing is dropped).
    rank_scale: Tokens kept for each rank.
    heads: Heads that SparseVLM+ reads.
    native: As released: the stage lists for 192, 128, 96 and 64 tokens, merged tokens on top of them and behind the
        kept ones, and in version 1.5 what is left is numbered anew after each cut.
    """

    version: str = "1.5"
    layers: Sequence[int] | None = None
    budget: str = "exact"
    rank_scale: float = 13.5
    heads: int = 14
    native: bool = False

    def __post_init__(self) -> None:
        check_choices(self, version=tuple(LISTS), budget=("exact", "average", "rank"))
        if self.layers is not None:
            object.__setattr__(self, "layers", tuple(self.layers))  # a list, where the options come from a file
            if not self.layers or list(self.layers) != sorted(set(self.layers)) or self.layers[0] < 0:
                raise ValueError(f"layers={self.layers} do not rise from 0; name each layer once, the first one first")
        if self.heads < 1:
            raise ValueError(f"heads={self.heads} reads none; give at least 1")
        if self.rank_scale <= 0:
            raise ValueError(f"rank_scale={self.rank_scale} keeps nothing; give more than 0")


@METHODS.register("sparsevlm", "sparsevlm-plus")
class SparseVLM(LayerPruner):
    """Both versions; `sparsevlm-plus` is the second."""

    card = Card(
        idea="drops in three stages, keeps what the most picture-like words of the prompt attend to",
        paper="SparseVLM: Visual Token Sparsification for Efficient Vision-Language Model Inference",
        year=2024,
        licence="Apache-2.0",
        certainty="release read",
        budget="exact K after the last stage, or K as the mean over layers",
    )
    needs: ClassVar[frozenset[str]] = frozenset({"llm_attention", "text"})
    Options: ClassVar[type] = SparseVLMOptions
    presets: ClassVar[dict[str, dict[str, Any]]] = {"sparsevlm-plus": {"version": "plus"}}

    @property
    def recycles(self) -> bool:
        return self.options.version == "1.5"

    @property
    def positions(self) -> str:
        return "packed" if self.options.native and self.recycles else "original"

    def cuts(self, num_layers: int) -> list[int]:
        """The layers before which tokens are dropped; a shallow model may have fewer of them than stages."""
        if self.options.layers is not None:
            return [check_cut(layer + 1, num_layers) for layer in self.options.layers]
        layers = RANK_LAYERS if self.options.budget == "rank" else LAYERS
        return [check_cut(min(layer + 1, num_layers - 1), num_layers) for layer in scale_layers(layers, num_layers)]

    def stages(self, num_layers: int, num_visual: int, keep: int) -> dict[int, int]:
        """As everywhere; with `native` merged tokens come on top, and by rank these are the fewest there can be."""
        options, cuts = self.options, self.cuts(num_layers)
        if keep >= num_visual:
            return dict.fromkeys(cuts, num_visual)
        if options.budget == "rank":
            return dict.fromkeys(cuts, 1)
        if options.native:
            lists = LISTS[options.version]
            if keep not in lists:
                raise ValueError(
                    f"keep={keep} has no list in the release, which has {', '.join(map(str, sorted(lists)))}; "
                    f"the smallest is {min(lists)}, or leave native out"
                )
            if len(cuts) != len(lists[keep]):
                raise ValueError(f"layers={options.layers} for lists of three; name three layers, or leave native out")
            return self.listed_stages(cuts, lists[keep], num_visual)
        cuts = sorted(set(cuts))
        if options.budget == "average":
            return average_stages(cuts, num_layers, num_visual, keep)
        return geometric_stages(cuts, num_visual, keep)

    def listed_stages(self, cuts: Sequence[int], counts: Sequence[int], num_visual: int) -> dict[int, int]:
        """What a release's list keeps at each cut: at least one token fewer than there are, merged ones counted."""
        stages, held = {}, num_visual
        for cut, count in zip(cuts, counts, strict=True):
            kept = stages[cut] = min(count, held - 1)
            held = kept + (num_recycled(held - kept)[1] if self.recycles else 0)
        return stages

    def select_at(self, state: LayerState, k: Int[Tensor, " B"]) -> Int[Tensor, "B K"] | Cut:
        assert state.prompt is not None
        real = state.visual >= 0
        counts = real.sum(-1)
        raters = columns_of(state.from_prompt(text_raters(state.prompt)))  # [B, R]
        if self.options.budget == "rank":
            by_rank = (attention_ranks(state, raters) * self.options.rank_scale).long().clamp_min(1)
            k = torch.where(k < counts, by_rank.minimum(counts - 1), counts)
        scores = self.score(state, raters)
        if not self.recycles:
            return hard_topk(scores, k, real)
        return self.recycle(state, scores, k)

    def score(self, state: LayerState, raters: Int[Tensor, "B R"]) -> Float[Tensor, "B M"]:
        """Attention each visual token gets from the raters, mean over raters and heads."""
        parts = []
        for rows, weights in rater_attention(state, raters):  # [B, H, r, M]
            if self.options.version == "plus":
                bias = state.rope_bias(rows).gather(-1, spread(state.visual, rows.shape[1]))  # [B, r, M]
                real = (rows >= 0)[..., None] & (state.visual >= 0)[:, None]
                weights = (weights / bias[:, None]).masked_fill(~real[:, None], 0.0)
            parts.append(weights.sum(2))  # [B, H, M]
        assert parts, "tokens are dropped from a prompt that has no word to rate them"
        total = torch.stack(parts).sum(0)
        if self.options.version == "plus":
            heads = hard_mask(total.sum(-1), min(self.options.heads, total.shape[1]))  # [B, H]
            total = total * heads[..., None] * (heads.shape[1] / heads.sum(-1))[:, None, None]
        return total.mean(1) / (raters >= 0).sum(-1, keepdim=True).clamp_min(1)

    def recycle(self, state: LayerState, scores: Float[Tensor, "B M"], k: Int[Tensor, " B"]) -> Cut:
        """The best tokens, and cluster means of some of the others in the places of the cluster centres."""
        rows = []
        for row, budget in enumerate(k.tolist()):
            current = int((state.visual[row] >= 0).sum())
            hidden = state.hidden[row, state.visual[row, :current]]  # [n, L]
            if self.options.native:
                top, clusters = budget, num_recycled(current - budget)[1] if budget < current else 0
            else:
                top, clusters = split_budget(current, budget)
            rows.append(keep_and_merge(hidden, scores[row, :current], top, clusters, sort=not self.options.native))
        pad = torch.nn.utils.rnn.pad_sequence
        keep = pad([keep for keep, _ in rows], batch_first=True, padding_value=-1)
        return Cut(keep=keep, hidden=pad([hidden for _, hidden in rows], batch_first=True))


# Who rates -----------------------------------------------------------------------------------------------------------


def text_raters(prompt: Prompt) -> Bool[Tensor, "B P"]:
    """True at the instruction tokens that the visual tokens resemble more than the average, on input embeddings.

    Each visual token spreads a weight of 1 over the text by softmax; the raters are those that get more than the mean
    (all, where every one gets the same). A prompt without visual tokens has none.
    """
    visual, text = columns_of(prompt.visual), columns_of(prompt.instruction)
    tokens, words = take_tokens(prompt.embeds, visual).float(), take_tokens(prompt.embeds, text).float()
    real = text >= 0
    weights = (tokens @ words.transpose(-1, -2)).masked_fill(~real[:, None], -torch.inf).softmax(-1)  # [B, N, M]
    share = weights.masked_fill((visual < 0)[..., None], 0.0).sum(1) / (visual >= 0).sum(-1, keepdim=True).clamp_min(1)
    mean = share.sum(-1, keepdim=True) / real.sum(-1, keepdim=True)
    chosen = (share > mean) & real
    chosen = torch.where(chosen.any(-1, keepdim=True), chosen, real) & prompt.visual.any(-1, keepdim=True)
    padded = torch.zeros(*prompt.visual.shape[:1], prompt.visual.shape[1] + 1, dtype=torch.bool, device=real.device)
    return padded.scatter(1, text.masked_fill(~real, prompt.visual.shape[1]), chosen)[:, :-1]


def rater_attention(state: LayerState, raters: Int[Tensor, "B R"]) -> Iterator[tuple[Tensor, Tensor]]:
    """Some raters at a time, and how their heads attend to the visual tokens [B, H, r, M]; 0 at padding."""
    for rows in raters.split(QUERY_CHUNK, dim=1):
        weights = state.attention(rows)  # [B, H, r, T]
        columns = spread(state.visual, rows.shape[1])[:, None].expand(-1, weights.shape[1], -1, -1)
        yield rows, weights.gather(-1, columns).masked_fill((state.visual < 0)[:, None, None], 0.0)


def spread(visual: Int[Tensor, "B M"], num_rows: int) -> Int[Tensor, "B R M"]:
    """Columns of the visual tokens once for each query row."""
    return visual.clamp_min(0)[:, None].expand(-1, num_rows, -1)


def attention_ranks(state: LayerState, raters: Int[Tensor, "B R"]) -> Int[Tensor, " B"]:
    """Rank of each prompt's rater-to-visual attention, head mean."""
    rows = torch.cat([weights.mean(1) for _, weights in rater_attention(state, raters)], dim=1)  # [B, R, M]
    sizes = zip((raters >= 0).sum(-1).tolist(), (state.visual >= 0).sum(-1).tolist(), strict=True)
    # Prompt by prompt: what counts as zero depends on the size of the matrix, so padding must not be part of it.
    ranks = [
        int(torch.linalg.matrix_rank(own[:r, :m])) if r and m else 0 for own, (r, m) in zip(rows, sizes, strict=True)
    ]
    return torch.tensor(ranks, device=raters.device)


# What is recycled ----------------------------------------------------------------------------------------------------


def num_recycled(num_dropped: int) -> tuple[int, int]:
    """Of the dropped tokens, how many are merged and into how many clusters."""
    merged = int(0.3 * num_dropped) + 1
    return merged, int(merged / 10) + 1


def split_budget(current: int, target: int) -> tuple[int, int]:
    """(tokens kept as they are, clusters) that together make `target` of `current`, with the release's clusters.

    Where the release would merge into more clusters than a quarter of the target, it is that quarter.
    """
    if target >= current:
        return current, 0
    most = target // 4
    for top in range(target, target - most - 1, -1):
        clusters = min(num_recycled(current - top)[1], most)
        if top + clusters == target:
            return top, clusters
    raise AssertionError("one token fewer kept adds at most one cluster")


def keep_and_merge(
    hidden: Float[Tensor, "n L"], scores: Float[Tensor, " n"], top: int, clusters: int, *, sort: bool
) -> tuple[Int[Tensor, " K"], Float[Tensor, "K L"]]:
    """Which tokens of one prompt stay, and what they hold: the `top` best as they are, then the merged ones.

    A merged token stands at its cluster's centre; with `sort` all are in raster order.
    """
    order = scores.sort(descending=True, stable=True).indices
    keep = order[:top].sort().values
    held = hidden[keep]
    if clusters:
        pool = order[top:][: num_recycled(len(order) - top)[0]]
        centres, member = density_peaks(hidden[pool].float(), clusters)
        sums = torch.zeros(clusters, hidden.shape[1], device=hidden.device).index_add_(0, member, hidden[pool].float())
        means = sums / torch.bincount(member, minlength=clusters)[:, None]
        keep, held = torch.cat([keep, pool[centres]]), torch.cat([held, means.to(held.dtype)])
    if sort:
        keep, raster = keep.sort()
        held = held[raster]
    return keep, held


def density_peaks(x: Float[Tensor, "m L"], num: int) -> tuple[Int[Tensor, " C"], Int[Tensor, " m"]]:
    """Centres of `num` clusters, the clearest first, and the cluster of each point.

    A centre is dense (its `num` nearest points, itself among them, are close) and far from anything denser. Points go
    to the nearest centre. Of equally dense points the first counts as the denser one, where the release adds noise.
    """
    distance = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist") / x.shape[1] ** 0.5
    density = (-distance.topk(num, dim=-1, largest=False).values.square().mean(-1)).exp()
    index = torch.arange(len(x), device=x.device)
    denser = (density[None] > density[:, None]) | ((density[None] == density[:, None]) & (index[None] < index[:, None]))
    to_denser = torch.where(denser, distance, distance.max()).amin(-1)
    centres = (density * to_denser).sort(descending=True, stable=True).indices[:num]
    member = distance[:, centres].argmin(-1)
    member[centres] = torch.arange(num, device=x.device)
    return centres, member
