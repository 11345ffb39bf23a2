"""One batch of laid-out prompts, answered: on the compiled path where there is one for it, else as `generate` does."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffprune.backbones.prompts import Batch
from diffprune.fast.options import NotCompiled, greedy_settings
from diffprune.serve.rows import Counts, DrawnTokens, EndedRows, Row, RowStreamer
from diffprune.types import VisualTokens


@torch.inference_mode()
def answer_rows(vlm: Any, batch: Batch, rows: Sequence[Row], keep: Sequence[int | float] | None) -> None:
    """Answer every row; what was said stands in it afterwards, and each is told when it has ended.

    Args:
        keep: One budget for each picture of the batch, in order; None: the model's own.
    """
    config = vlm.base.generation_config
    ends = config.eos_token_id
    ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    streamer = RowStreamer(vlm.backbone.tokenizer, rows, ends)
    longest = max(row.max_tokens for row in rows)
    if vlm.fast is not None:
        try:
            greedy_settings(config, {"max_new_tokens": longest, "do_sample": False})
            if longest > vlm.fast.max_new_tokens:
                raise NotCompiled(f"the answer may be longer than the {vlm.fast.max_new_tokens} tokens compiled for")
            _compiled(vlm, batch, rows, keep, streamer, longest)
            return
        except NotCompiled as reason:
            vlm._say_once(f"the fast path cannot answer here: {reason}; such requests run as without compile()")
    tokens = vlm.encode(batch)
    k = vlm.counts(tokens, keep)
    lm = vlm.lm_inputs(batch, tokens, keep=keep)
    _note(rows, "eager", count_tokens(vlm, batch, tokens, k, lm.attention_mask.sum(-1)))
    drawn = {"logits_processor": [DrawnTokens(rows)]} if any(row.draws for row in rows) else {}
    vlm.decoder.generate(
        lm,
        vlm.prompt_counts(batch, k),
        max_new_tokens=longest,
        do_sample=False,
        streamer=streamer,
        stopping_criteria=[EndedRows(rows)],
        **drawn,
    )


def _note(rows: Sequence[Row], path: str, counts: Sequence[Counts]) -> None:
    for row, own in zip(rows, counts, strict=True):
        row.path, row.counts = path, own


def _compiled(
    vlm: Any,
    batch: Batch,
    rows: Sequence[Row],
    keep: Sequence[int | float] | None,
    streamer: RowStreamer,
    longest: int,
) -> None:
    drawn = DrawnTokens(rows)

    def draw(logits: Float[Tensor, "B V"]) -> Int[Tensor, " B"]:
        return drawn(torch.zeros(len(rows), 0, dtype=torch.int64), logits).argmax(-1)

    choose = draw if any(row.draws for row in rows) else None
    with vlm.fast.turn():
        request = vlm.fast.start(batch, keep=keep)
        tokens = None if request.tokens is None else request.tokens.take(range(batch.num_images))
        k = vlm.counts(tokens, keep)
        kept = torch.zeros(len(rows), dtype=torch.int64) if k is None else vlm.prompt_counts(batch, k).cpu()
        ids, real = batch.features["input_ids"].cpu(), batch.features["attention_mask"].cpu().bool()
        text = (real & (ids != vlm.backbone.image_token_id)).sum(-1)
        _note(rows, "fast", count_tokens(vlm, batch, tokens, k, text + kept))
        streamer.put(ids)
        for token in vlm.fast.tokens(request, longest, choose):
            streamer.put(token.cpu())
            if streamer.is_over:
                break
        streamer.end()


def count_tokens(
    vlm: Any, batch: Batch, tokens: VisualTokens | None, k: Int[Tensor, " I"] | None, prompts: Int[Tensor, " B"]
) -> list[Counts]:
    """Tokens of each prompt.

    Args:
        k: Kept of each picture.
        prompts: All that the language model was given of each prompt.
    """
    if tokens is None or k is None:
        return [Counts(0, 0, int(total)) for total in prompts]
    whole, kept = vlm.prompt_counts(batch, tokens.counts), vlm.prompt_counts(batch, k)
    return [Counts(*map(int, one)) for one in zip(whole.cpu(), kept.cpu(), prompts.cpu(), strict=True)]
