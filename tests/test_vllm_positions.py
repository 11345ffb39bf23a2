"""Original positions inside an engine: what its rows hold, in pieces and again, against the numbering of the splice."""

import pytest
import torch

from diffprune.backbones.pictures import pieces
from diffprune.integrations.vllm_positions import (
    Run,
    first_positions,
    from_channels,
    next_position,
    to_channels,
    with_places,
)
from diffprune.model import PrunedVLM
from tests import tiny


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_places_come_through_any_float_type(dtype: torch.dtype) -> None:
    places = torch.tensor([[0, 1], [255, 256], [257, 576], [65_535, 65_536], [16_777_215, 2_879]])
    assert torch.equal(from_channels(to_channels(places).to(dtype)), places)
    assert not torch.equal(torch.tensor([577.0]).to(torch.bfloat16).long(), torch.tensor([577]))  # why not as they are


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
@pytest.mark.parametrize("piece", [3, 7, 1000])
def test_a_prompt_that_runs_in_pieces_has_the_positions_of_the_splice(family: str, piece: int) -> None:
    vlm = PrunedVLM(*tiny.build(family), method="feature_norm", keep=5)
    backbone = vlm.backbone
    images = [tiny.picture(seed, size) for seed, size in ((1, (100, 70)), (2, (60, 90)))]
    text = "See " + backbone.placeholder_prompt(1) + " and " + backbone.placeholder_prompt(1) + " there"
    batch = vlm.prepare([images], [text])
    tokens = vlm.encode(batch)
    kept = vlm.rule.deploy(tokens, vlm.counts(tokens))
    lm = vlm.splice(batch, tokens, kept)
    ids, wanted = lm.input_ids[0], lm.position_ids[..., 0, :].expand(3 if family == "qwen2_5_vl" else 1, -1)
    at = (ids == backbone.image_token_id).nonzero()[:, 0].tolist()
    starts = [at[0], at[5]]
    runs = [Run(start, 5, int(full)) for start, full in zip(starts, tokens.counts, strict=True)]

    def number(unpruned: torch.Tensor) -> torch.Tensor:
        assert torch.equal(unpruned, batch.features["input_ids"])
        return backbone.positions(batch)

    positions = first_positions(ids.tolist(), runs, backbone.image_token_id, number)
    assert next_position(positions) == int(wanted.max()) + 1 - len(ids)
    text_only = ids != backbone.image_token_id
    assert torch.equal(positions[: len(wanted), text_only], wanted[:, text_only])
    places = kept.index.flatten()[:, None]
    if family == "qwen2_5_vl":
        columns = torch.tensor([grid[1] for grid in tokens.grid]).repeat_interleave(5)[:, None]
        places = torch.cat([places // columns, places % columns], -1)
    visual = ~text_only
    for start in range(0, len(ids), piece):
        before, here = int(visual[:start].sum()), int(visual[start : start + piece].sum())
        for _ in range(2):  # once more changes nothing
            positions = with_places(
                positions,
                ids,
                places[before : before + here],
                image_token=backbone.image_token_id,
                start=start,
            )
    assert torch.equal(positions[: len(wanted)], wanted)
    assert next_position(positions) == int(wanted.max()) + 1 - len(ids)


def test_pictures_are_encoded_in_pieces_no_larger_than_was_measured() -> None:
    assert pieces([576] * 5, 1728) == [[0, 1, 2], [3, 4]]
    assert pieces([100, 2000, 100, 100], 576) == [[0], [1], [2, 3]]
    assert pieces([], 576) == []
