"""Line plots as SVG that takes its colors from the page's style sheet, so that it follows light and dark."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

WIDTH, HEIGHT = 440, 280  # hardly wider than a phone, where text must be read and nothing be scrolled to
LEFT, RIGHT, TOP, BOTTOM = 32, 126, 26, 42  # margins: numbers on the left, names on the right
LINE = 14  # units between two names
WHISKER_GAP = 3

Number = int | float
Point = tuple[Number, Number]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One curve: `css` is its class, `interval` gives a whisker (low, high) at each point."""

    label: str
    css: str
    points: Sequence[Point]
    interval: Sequence[Point] = ()
    faint: Sequence[Point] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """What is where: values of the ticks, their text, and names of the two axes."""

    x_ticks: Sequence[Number]
    y_ticks: Sequence[Number]
    x_name: str
    y_name: str
    log_x: bool = False

    @property
    def place_x(self) -> Callable[[Number], float]:
        warp: Callable[[Number], float] = math.log2 if self.log_x else float
        low, high = warp(min(self.x_ticks)), warp(max(self.x_ticks))
        return lambda value: LEFT + 10 + (warp(value) - low) / (high - low) * (WIDTH - LEFT - RIGHT - 20)

    @property
    def place_y(self) -> Callable[[Number], float]:
        low, high = min(self.y_ticks), max(self.y_ticks)
        return lambda value: HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)


def plot(lines: Sequence[Line], axes: Axes, *, title: str) -> str:
    """The SVG element; names stand at the right ends of their curves."""
    x, y = axes.place_x, axes.place_y
    parts = [f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">']
    for value in axes.y_ticks:
        parts.append(f'<path class="rule" d="M{LEFT} {y(value):.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g}</text>')
    for value in axes.x_ticks:
        parts.append(
            f'<text class="tick" x="{x(value):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{value:g}</text>'
        )
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="axis" x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(axes.x_name)}</text>')
    parts.append(f'<text class="axis" x="2" y="{TOP - 14}">{escape(axes.y_name)}</text>')
    for index, line in enumerate(lines):
        # Curves with whiskers stand a little apart, so that each whisker can be seen.
        shift = WHISKER_GAP * (index - (len(lines) - 1) / 2) if line.interval else 0.0
        parts.append(f'<g class="{line.css}" transform="translate({shift:.1f})">')
        if line.faint:
            parts.append(f'<path class="faint" d="{_path(line.faint, x, y)}"/>')
        for (place, _), (low, high) in zip(line.points, line.interval, strict=False):
            parts.append(f'<path class="whisker" d="M{x(place):.1f} {y(low):.1f}V{y(high):.1f}"/>')
        parts.append(f'<path class="curve" d="{_path(line.points, x, y)}"/>')
        if line.interval:
            parts += [f'<circle cx="{x(a):.1f}" cy="{y(b):.1f}" r="2.6"/>' for a, b in line.points]
        parts.append("</g>")
    for line, place in zip(lines, _spread([y(line.points[-1][1]) for line in lines]), strict=True):
        end = x(line.points[-1][0]) + (16 if line.interval else 8)
        parts.append(f'<text class="name {line.css}" x="{end:.1f}" y="{place + 4:.1f}">{escape(line.label)}</text>')
    return "".join(parts) + "</svg>"


def _path(points: Sequence[Point], x: Callable[[Number], float], y: Callable[[Number], float]) -> str:
    return "M" + "L".join(f"{x(a):.1f} {y(b):.1f}" for a, b in points)


def _spread(places: Sequence[Number]) -> list[float]:
    """Heights of names, moved apart as little as needed, so that none lies on another."""
    order = sorted(range(len(places)), key=lambda i: places[i])
    out = list(places)
    for above, below in pairwise(order):
        out[below] = max(out[below], out[above] + LINE)
    overflow = max(0.0, max(out, default=0.0) - (HEIGHT - BOTTOM))
    out = [place - overflow for place in out]
    for above, below in reversed(list(pairwise(order))):
        out[above] = min(out[above], out[below] - LINE)
    return out


def nice_ticks(low: Number, high: Number, *, count: int = 5) -> list[float]:
    """About `count` round values, two at least, from at most `low` to at least `high`."""
    span = (high - low) or 1.0
    power = 10.0 ** math.floor(math.log10(span / count))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if span / (factor * power) <= count + 0.5)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 10) for i in range(first, max(last, first + 1) + 1)]


def smooth(values: Sequence[Number], *, share: float = 0.05) -> list[float]:
    """The mean of each value and those before it, weighted by how near they are."""
    decay = math.exp(-1 / max(1.0, share * len(values)))
    out: list[float] = []
    total = weight = 0.0
    for value in values:
        total, weight = total * decay + value, weight * decay + 1
        out.append(total / weight)
    return out
