"""Plots: ticks, names that do not overlap, smoothing."""

import xml.etree.ElementTree as xml
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffprune_lab.demo.plots import BOTTOM, HEIGHT, LINE, TOP, Axes, Line, _spread, nice_ticks, plot, smooth

AXES = Axes(x_ticks=(8, 16, 32), y_ticks=(0, 50, 100), x_name="kept <tokens>", y_name="%", log_x=True)


def test_a_plot_is_well_formed_and_points_lie_where_they_belong() -> None:
    line = Line(label="a & b", css="ours", points=[(8, 0), (16, 50), (32, 100)], interval=[(0, 1), (49, 51), (99, 100)])
    root = xml.fromstring(plot([line], AXES, title="t"))
    circles = [node for node in root.iter() if node.tag == "circle"]
    heights = [float(node.attrib["cy"]) for node in circles]
    assert heights == pytest.approx([HEIGHT - BOTTOM, (HEIGHT - BOTTOM + TOP) / 2, TOP])
    places = [float(node.attrib["cx"]) for node in circles]
    assert places[1] - places[0] == pytest.approx(places[2] - places[1], abs=0.2)  # octaves are equally wide
    assert [node.text for node in root.iter() if "name" in node.attrib.get("class", "")] == ["a & b"]
    assert sum("whisker" in node.attrib.get("class", "") for node in root.iter()) == 3


@given(st.lists(st.floats(TOP, HEIGHT - BOTTOM), min_size=1, max_size=7))
def test_names_are_moved_apart_and_keep_their_order(places: list[float]) -> None:
    moved = _spread(places)
    ordered = sorted(moved)
    assert all(below - above >= LINE - 1e-6 for above, below in pairwise(ordered))
    assert max(moved) <= HEIGHT - BOTTOM + 1e-6
    order = sorted(range(len(places)), key=lambda i: places[i])
    assert [moved[i] for i in order] == pytest.approx(ordered)


def test_names_that_are_apart_stay() -> None:
    assert _spread([40.0, 100.0]) == [40.0, 100.0]


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 100, [0, 20, 40, 60, 80, 100]),
        (42, 101, [40, 60, 80, 100, 120]),
        (0, 3.7, [0, 1, 2, 3, 4]),
        (5, 5, [5, 5.2]),
    ],
)
def test_ticks_are_round_and_hold_the_range(low: float, high: float, ticks: list[float]) -> None:
    assert nice_ticks(low, high) == pytest.approx(ticks)


def test_smoothing_keeps_a_constant_and_follows_a_step() -> None:
    assert smooth([2.0] * 5) == pytest.approx([2.0] * 5)
    stepped = smooth([0.0] * 50 + [1.0] * 50)
    assert stepped[49] == 0 and 0 < stepped[52] < 1 and stepped[-1] == pytest.approx(1.0, abs=1e-3)
