"""The scorer that ships, in half precision: both paths keep the same tokens but for ties in rounding."""

import pytest
import torch
from PIL import Image

from diffprune.fast.verify import rounding
from diffprune.loading import load_base
from diffprune.model import PrunedVLM
from diffprune_lab.scenes import pack, render
from diffprune_lab.scenes.tasks import build_task

KEEP = 64


@pytest.fixture(scope="module")
def vlm() -> PrunedVLM:
    model, processor = load_base("scenes-llava", dtype=torch.bfloat16)
    # By the largest scores: a greedy choice goes on from every token it took, so after one tie all others may differ.
    return PrunedVLM.from_pretrained(
        "scenes-llava-diffprune", base=model, processor=processor, method="diffprune", keep=KEEP
    )


@pytest.mark.slow
@torch.no_grad()
def test_in_bfloat16_both_paths_keep_the_same_tokens_but_for_ties_and_give_the_same_logits(vlm: PrunedVLM) -> None:
    questions = [build_task(task, "test", 1).questions[0] for task in ("gqa", "textvqa")]
    pictures = [Image.fromarray(row.permute(1, 2, 0).numpy()) for row in render(pack([q.scene for q in questions]))]
    vlm.compile(batch_sizes=(2,), text_buckets=(64,), max_new_tokens=1, image_sizes=[pictures[0].size])
    batch = vlm.prepare([[picture] for picture in pictures], [question.prompt for question in questions])
    run = vlm.fast.start(batch)
    assert run.chooser is not None and run.chooser.prune is not None and run.kept is not None
    tokens = vlm.encode(batch)
    assert tokens is not None and tokens.x.dtype == torch.bfloat16
    scores = vlm.method.score(tokens)  # in float32, as it was trained; the fast path's in bfloat16
    limit = rounding(torch.bfloat16)
    for row, wanted in enumerate(vlm.select(pictures, [question.prompt for question in questions]).keep):
        score, spread = scores[row], scores[row].std()
        assert (run.chooser.logits[row] - score).abs().max() <= limit * spread
        last = score.sort(descending=True).values[KEEP - 1]
        swapped = sorted({*run.kept[row].tolist()} ^ {*wanted.tolist()})
        assert len(set(run.kept[row].tolist())) == KEEP
        assert ((score[swapped] - last).abs() <= limit * spread).all()
    found, exact = run.logits.float(), vlm.logits(batch)[0][:, -1].float()
    assert ((found - exact).square().mean(-1).sqrt() <= limit * exact.std(-1)).all()
