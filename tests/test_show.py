"""What `diffprune show` draws: kept tokens where they look, over every family, in pixels and as SVG."""

import copy
import json
import re
import xml.etree.ElementTree as ET
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import diffprune as dp
from diffprune.cli.main import _run
from diffprune.methods.base import Card, ScoringPruner
from diffprune.model import PrunedVLM
from diffprune.types import ImageSelection, VisualTokens
from diffprune.viz import Panel, draw, heat_map, light_up
from diffprune.viz.sheet import LINE, MARGIN
from diffprune.viz.tokens import DIMMED, OUTLINE, SMALLEST, STRIPES, in_view, resized, views_of
from tests import stock, tiny
from tests.contracts.vlm import pruned
from tests.train import runs

PAGE = Path(__file__).parents[1] / "docs" / "show.md"
BACKGROUND = 120
TWO_VIEWS = {"llava_next", "llava_onevision", "internvl", "idefics3", "smolvlm"}  # whole and in tiles
WIDE = (200, 90)


class MovedIn(ScoringPruner):
    """Scores some of the tokens by how far their features moved from those of a reference picture, the others last."""

    name = "moved_in"
    card = Card(idea="for tests")

    def __init__(self, reference: Tensor, tokens: Tensor) -> None:
        super().__init__()
        self.reference, self.tokens = reference, tokens

    def score(self, tokens: VisualTokens) -> Tensor:
        out = torch.full(tokens.x.shape[:2], -1.0)
        out[:, self.tokens] = (tokens.x - self.reference).norm(dim=-1)[:, self.tokens]
        return out


def plain(size: tuple[int, int], patch: tuple[int, int] | None = None) -> Image.Image:
    """A grey picture, with a white patch of six pixels around a point."""
    pixels = np.full((size[1], size[0], 3), BACKGROUND, np.uint8)
    if patch is not None:
        x, y = patch
        pixels[y - 3 : y + 3, x - 3 : x + 3] = 255
    return Image.fromarray(pixels)


@cache
def near_sighted(family: str) -> tuple[Any, Any]:
    """The tiny model of a family without attention in its tower: a token's features are of what it looks at alone."""
    built, processor = tiny.build(family)
    model = copy.deepcopy(built)
    ends = re.compile(r"(vision|visual).*(attn\.(out_proj|proj)|attention\.projection_layer|attention\.output\.dense)$")
    found = [part for name, part in model.named_modules() if ends.search(name)]
    assert len(found) >= tiny.LAYERS - 1, f"{family} calls the end of its attention otherwise"
    for part in found:
        torch.nn.init.zeros_(part.weight)
        if part.bias is not None:
            torch.nn.init.zeros_(part.bias)
    return model, processor


def seeing(family: str, method: Any = "full", **options: Any) -> PrunedVLM:
    return PrunedVLM(*near_sighted(family), method=method, **options)


def encoded(family: str, picture: Image.Image) -> VisualTokens:
    vlm = seeing(family)
    tokens = vlm.encode(vlm.prepare([picture], [""]))
    assert tokens is not None
    return tokens


def cells(path: Path, picture: Image.Image, number: int) -> list[np.ndarray]:
    """The drawings of a file, without the lines above them where there are several; all in one row."""
    sheet = np.asarray(Image.open(path))
    if number == 1:
        return [sheet]
    height = sheet.shape[0] - 2 * MARGIN - LINE
    width = (sheet.shape[1] - MARGIN) // number - MARGIN
    assert width * picture.height == height * picture.width, "nothing is stretched"
    top = MARGIN + LINE
    lefts = [MARGIN + at * (width + MARGIN) for at in range(number)]
    return [sheet[top : top + height, left : left + width] for left in lefts]


@pytest.mark.parametrize("family", stock.FAMILIES)
@pytest.mark.parametrize("size", [(112, 112), (100, 150)])
def test_a_kept_token_is_drawn_where_the_planted_patch_is(family: str, size: tuple[int, int], tmp_path: Path) -> None:
    patch = (int(0.55 * size[0]), int(0.6 * size[1]))
    picture, reference = plain(size, patch), encoded(family, plain(size)).x
    views = views_of(seeing(family).select([plain(size)])[0])
    assert sorted(view.name for view in views) == (["overview", "tiles"] if family in TWO_VIEWS else [""])
    for chosen, view in enumerate(views):
        vlm = seeing(family, MovedIn(reference, view.tokens), keep=1)
        (selection,) = vlm.select([picture])
        assert int(selection.keep) in view.tokens
        draw(picture, [Panel("moved", selection)], tmp_path / "kept.png")
        drawn = cells(tmp_path / "kept.png", picture, len(views))
        factor = drawn[0].shape[1] / size[0]
        assert selection.boxes is not None
        x0, y0, x1, y1 = selection.boxes[int(selection.keep)].tolist()
        reach = 3 + max(x1 - x0, y1 - y0)  # half the patch, and a token that holds its edge
        for number, image in enumerate(drawn):
            rows, columns = np.nonzero((image >= BACKGROUND).all(-1) & (image[..., 0] == image[..., 2]))  # not stripes
            if number != chosen:
                assert not len(rows), "nothing of the other view is kept"
                continue
            assert len(rows) == pytest.approx((x1 - x0) * (y1 - y0) * factor**2, rel=0.15)
            assert (image[rows, columns] == 255).any(), "the patch itself is lit"
            assert np.abs(columns / factor - patch[0]).max() <= reach
            assert np.abs(rows / factor - patch[1]).max() <= reach


@pytest.mark.parametrize("family", stock.FAMILIES)
def test_what_is_striped_is_what_the_model_does_not_see(family: str) -> None:
    reference = encoded(family, plain(WIDE)).x
    (selection,) = pruned(family).select([plain(WIDE)])
    drawn = np.asarray(light_up(plain(WIDE), selection))
    striped = [x for x in (10, 60, 100, 140, 190) if tuple(int(value) for value in drawn[45, x]) in STRIPES]
    blind = [x for x in (10, 60, 100, 140, 190) if torch.equal(encoded(family, plain(WIDE, (x, 45))).x, reference)]
    assert striped == blind
    assert blind == ([10, 190] if family == "llava" else []), "LLaVA alone cuts the sides off"


def selection(keep: list[int], logits: list[float] | None = None) -> ImageSelection:
    boxes = torch.tensor([[0.0, 0, 4, 4], [4, 0, 8, 4], [0, 4, 4, 8], [4, 4, 8, 8]])
    scores = None if logits is None else torch.tensor(logits)
    return ImageSelection(keep=torch.tensor(keep, dtype=torch.int64), logits=scores, grid=(2, 2), boxes=boxes)


def test_a_small_picture_is_enlarged_and_a_large_one_among_several_is_not_kept_whole() -> None:
    small, large = tiny.picture(1, (8, 6)), tiny.picture(1, (3000, 300))
    made, moved = resized(small, selection([1]))
    assert made.size == (SMALLEST, SMALLEST * 6 // 8) and moved.boxes is not None
    assert moved.boxes[1].tolist() == [240, 0, 480, 240]
    assert np.array_equal(np.asarray(made)[::60, ::60], np.asarray(small)), "pixels stay what they are"
    assert resized(large, selection([1]))[0] is large
    made, moved = resized(large, selection([1]), most=960)
    assert made.size == (960, 96) and moved.boxes is not None and moved.boxes[1, 2] == pytest.approx(8 * 0.32)


def test_the_highest_score_is_the_brightest_and_kept_tokens_are_outlined() -> None:
    made, moved = resized(Image.new("RGB", (8, 8), (0, 0, 0)), selection([3], [0.0, 1.0, 2.0, 3.0]))
    drawn = np.asarray(heat_map(made, moved)).astype(int)
    side = SMALLEST // 2
    middles = [drawn[side // 2 + row * side, side // 2 + column * side].sum() for row in (0, 1) for column in (0, 1)]
    assert middles == sorted(middles) and middles[0] < middles[3]
    white = (drawn == OUTLINE).all(-1)
    assert white[side:, side:].sum() == 4 * side - 4 and not white[:side].any()


def test_scores_that_are_equal_or_infinite_are_drawn() -> None:
    picture = Image.new("RGB", (8, 8))
    one = np.asarray(heat_map(picture, selection([0], [2.0, 2.0, 2.0, 2.0])))
    assert (one[5:, :3] == one[5, 0]).all()
    lowest = np.asarray(heat_map(picture, selection([], [-torch.inf, 0.0, 1.0, torch.inf])))
    assert np.array_equal(lowest[0, 0], lowest[0, 4]) and np.array_equal(lowest[7, 0], lowest[7, 7])


def rectangles(path: Path) -> list[tuple[int, list[float]]]:
    """Number and place of each token of an SVG file."""
    found = [rect for rect in ET.parse(path).iter() if rect.get("data-token") is not None]
    return [
        (int(rect.get("data-token", "")), [float(rect.get(key, "")) for key in ("x", "y", "width", "height")])
        for rect in found
    ]


def test_an_svg_holds_each_kept_token_and_nothing_from_elsewhere(tmp_path: Path) -> None:
    draw(tiny.picture(1, (8, 8)), [Panel("a <b> & c", selection([1, 2]))], tmp_path / "kept.svg")
    assert rectangles(tmp_path / "kept.svg") == [(1, [240, 0, 240, 240]), (2, [0, 240, 240, 240])]
    text = (tmp_path / "kept.svg").read_text()
    assert text.count("http") == 1 and "http://www.w3.org/2000/svg" in text  # the name of the format
    assert "a &lt;b&gt; &amp; c" in text
    draw(tiny.picture(1, (8, 8)), [Panel("a", selection([1], [0.0, 1, 2, 3]))], tmp_path / "heat.svg", heat=True)
    assert sorted(number for number, _ in rectangles(tmp_path / "heat.svg")) == [0, 1, 2, 3]
    (outlined,) = [rect for rect in ET.parse(tmp_path / "heat.svg").iter() if rect.get("stroke") == "white"]
    assert outlined.get("data-token") == "1"


def test_tokens_of_an_svg_keep_their_numbers_in_every_view(tmp_path: Path) -> None:
    vlm = pruned("idefics3", "uniform_grid", keep=12)
    picture = tiny.picture(1, (112, 112))
    (found,) = vlm.select([picture])
    draw(picture, [Panel("grid", found)], tmp_path / "kept.svg")
    assert sorted(number for number, _ in rectangles(tmp_path / "kept.svg")) == found.keep.tolist()
    parts = [in_view(found, view) for view in views_of(found)]
    assert sum(len(part.keep) for part in parts) == 12 and all(len(part.keep) for part in parts)
    texts = [one.text or "" for one in ET.parse(tmp_path / "kept.svg").iter() if one.tag.endswith("text")]
    assert len(texts) == 2 and "tiles" in texts[0] and "overview" in texts[1]


def test_what_was_cut_off_is_striped_in_an_svg_too(tmp_path: Path) -> None:
    picture = plain(WIDE)
    draw(picture, [Panel("all", pruned("llava").select([picture])[0])], tmp_path / "kept.svg")
    (path,) = [one for one in ET.parse(tmp_path / "kept.svg").iter() if one.tag.endswith("path")]
    assert path.get("fill") == "url(#unseen)"
    draw(picture, [Panel("all", pruned("qwen2_5_vl").select([picture])[0])], tmp_path / "kept.svg")
    assert not [one for one in ET.parse(tmp_path / "kept.svg").iter() if one.tag.endswith("path")]


# The command ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a model that sees 4 x 4 tokens."""
    return str(runs.save_model(tmp_path_factory.mktemp("base")))


@pytest.fixture(scope="module")
def picture_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("picture") / "picture.png"
    tiny.picture(1, (tiny.SIDE, tiny.SIDE)).save(path)
    return path


def show(picture: Path, *arguments: str) -> int:
    return _run(["show", "--image", str(picture), "--device", "cpu", *arguments])


def test_several_methods_and_budgets_are_one_sheet(model: str, picture_file: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "sheet.png"
    asked = ["--model", model, "--method", "random[seed=1],feature_norm,full", "--keep", "2,8", "--json"]
    assert show(picture_file, *asked, "--out", str(out)) == 0
    panels = json.loads(capsys.readouterr().out)["panels"]
    assert [(panel["method"], len(panel["keep"])) for panel in panels] == [
        ("random[seed=1]", 2),
        ("random[seed=1]", 8),
        ("feature_norm", 2),
        ("feature_norm", 8),
        ("full", 16),
    ]
    sheet = np.asarray(Image.open(out))
    picture = np.asarray(Image.open(picture_file).resize((504, 504), Image.Resampling.NEAREST))
    assert sheet.shape[:2] == (MARGIN + 3 * (504 + LINE + MARGIN), MARGIN + 2 * (504 + MARGIN))
    for number, panel in enumerate(panels):
        top, left = MARGIN + LINE + number // 2 * (504 + LINE + MARGIN), MARGIN + number % 2 * (504 + MARGIN)
        lit = (sheet[top : top + 504, left : left + 504] == picture).all(-1)
        cell = 504 // 4
        bright = {
            4 * r + c for r in range(4) for c in range(4) if lit[r * cell + 63 : r * cell + 64, c * cell :][0][63]
        }
        assert bright == set(panel["keep"])
    assert (sheet[MARGIN : MARGIN + LINE, MARGIN : MARGIN + 300] < 100).any(), "a line of text stands above"
    assert DIMMED < 0.5


def test_a_saved_pruner_is_drawn_beside_methods_without_weights(
    model: str, picture_file: Path, tmp_path: Path, capsys: Any
) -> None:
    dp.PrunedVLM(*tiny.build("llava"), method="diffprune", keep=4).save_pretrained(tmp_path / "p", base_id=model)
    pruner, out = ["--pruner", str(tmp_path / "p"), "--json"], ["--out", str(tmp_path / "x.svg")]
    assert show(picture_file, *pruner, *out, "--method", "diffprune,diffprune-diverse,random") == 0
    assert [len(one["keep"]) for one in json.loads(capsys.readouterr().out)["panels"]] == [4, 4, 4]
    assert show(picture_file, *pruner, *out, "--heat") == 0
    assert json.loads(capsys.readouterr().out)["method"] == "diffprune"
    assert len(rectangles(tmp_path / "x.svg")) == 16
    (told,) = [line for line in PAGE.read_text().splitlines() if "--heat --out" in line]
    methods = re.search(r"--method (\S+)", told)
    assert methods and show(picture_file, *pruner, *out, "--heat", "--method", methods[1]) == 0, "what the page tells"
    capsys.readouterr()
    assert show(picture_file, *pruner, *out, "--method", "visionselector") == 2
    assert "'visionselector' is learned and needs weights" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--out", "{}/kept.gif"], "kept.gif does not end as a drawing does; name a file with .png, .jpg"),
        (["--out", "{}/kept"], "kept does not end as a drawing does"),
        (
            ["--out", "{}/x.png", "--heat", "--method", "divprune", "--keep", "4"],
            "'divprune' has no score for each token",
        ),
        (["--out", "{}/x.png", "--matrix", "--heat"], "--matrix is a drawing of one method at one budget"),
        (["--out", "{}/x.png", "--matrix", "--keep", "4,8"], "--matrix is a drawing of one method at one budget"),
        (["--out", "{}/x.png", "--keep", "4,x"], "keep='x'"),
        (["--out", "{}/x.png", "--keep", ","], "keep=',' holds no budget; give tokens (64) or a share (0.111)"),
        (["--out", "{}/x.png", "--keep", "4", "--method", "full"], "keep=4 needs something that chooses"),
        (["--out", "{}/x.png", "--keep", "4", "--method", "random,fastv"], "fastv chooses inside the language model"),
    ],
)
def test_what_cannot_be_drawn_is_one_sentence(
    arguments: list[str], sentence: str, model: str, picture_file: Path, tmp_path: Path, capsys: Any
) -> None:
    filled = [argument.format(tmp_path) for argument in arguments]
    assert show(picture_file, "--model", model, "--json", *filled) == 2
    error = capsys.readouterr().err.strip()
    assert sentence in error and len(error.splitlines()) == 1
    assert not list(tmp_path.iterdir()), "nothing is written"
