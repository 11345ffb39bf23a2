"""p-MoD with its rules replaced one at a time."""

from pathlib import Path

import pytest
import torch

from diffprune.evaluate.runner import encode_questions
from diffprune.loading import load_base
from diffprune.methods.base import take
from diffprune.methods.p_mod import PMod
from diffprune.model import PrunedVLM
from diffprune.results import read_results
from diffprune_lab.scenes import pack, render
from diffprune_lab.scenes.encode import to_images
from diffprune_lab.scenes.source import SCENES_TASKS
from diffprune_lab.studies import routes
from lab.tests import tiny_scenes

WEIGHTLESS = ("random", "even", "one")


def test_one_set_in_every_layer_with_weights_of_1_is_dropping_it_before_the_model() -> None:
    vlm = tiny_scenes.pruned("p_mod", keep=9)
    encoded = encode_questions(vlm, SCENES_TASKS.build(("gqa",), count=3))
    assert isinstance(vlm.method, PMod)
    rerouted = vlm.with_method(routes.Rerouted(vlm.method, WEIGHTLESS, encoded.oracle()), keep=9)
    images = to_images(render(pack(encoded.images)))
    batch = vlm.prepare(images, ["what?"] * len(images), ["a star"] * len(images))
    tokens = vlm.encode(batch)
    assert tokens is not None
    numbers = torch.rand(36, generator=torch.Generator().manual_seed(routes.SEED))
    chosen = numbers.topk(9).indices.sort().values.expand(len(images), -1)
    with torch.no_grad():
        routed = rerouted.loss(batch, tokens=tokens, hard=True)
        dropped = vlm.decoder.loss(vlm.splice(batch, tokens, take(tokens, chosen)), None, None)[0]
        weighed = vlm.loss(batch, tokens=tokens, hard=True)
    torch.testing.assert_close(routed, dropped, rtol=1e-5, atol=1e-5)
    assert abs(weighed - dropped) > 1e-4, "the method itself chooses otherwise"


def test_every_rule_is_a_row_that_says_what_it_sent_through(tmp_path: Path, capsys) -> None:
    folder, out = tmp_path / "pruner", tmp_path / "routes.json"
    model, processor = tiny_scenes.always_says("yes")
    model.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    PrunedVLM(*load_base(tmp_path / "model"), method="p_mod", keep=9).save_pretrained(folder)
    routes.main([str(folder), "--keep", "9", "--questions", "2", "--tasks", "pope", "--out", str(out), "--commit", "a"])
    assert "wrote" in capsys.readouterr().out
    rows = {row["method"]: row for row in read_results(out).rows if "retention" in row}
    assert list(rows) == ["full", *routes.RULES, "routers, untrained", "random", "oracle"]
    seen = rows["oracle's order"]["on_items"]
    assert len(seen) == 2 + 1 and min(seen[:2]) > seen[2] > 0, "the oracle sends through what shows something"
    assert rows["routers"]["average"] == 9.0 and "on_items" not in rows["random"]


def test_another_method_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="scenes-llava-diffprune holds 'diffprune'; give a trained p_mod"):
        routes.main(["scenes-llava-diffprune", "--out", str(tmp_path / "x.json")])
