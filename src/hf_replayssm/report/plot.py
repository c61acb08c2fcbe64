"""Line plots as SVG text. Colours and fonts are the page's style sheet's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape


WIDTH, HEIGHT = 640, 340
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 12, 44
COLOURS = 7  # that the style sheet has; further series are dashed


@dataclass(frozen=True)
class Point:
    x: float
    y: float
    about: str = ""  # shown when pointed at


@dataclass(frozen=True)
class Plot:
    """Named series over two axes. A logarithmic axis leaves out what is not positive."""

    title: str
    x_label: str
    y_label: str
    series: dict[str, list[Point]]
    x_log: bool = True
    y_log: bool = False
    lines: Sequence[float] = ()  # heights of thin horizontal lines
    palette: Sequence[str] = ()  # names in the order of the colours, for plots beside each other; else the series'

    def shown(self) -> dict[str, list[Point]]:
        """The points that can be drawn, sorted; series without any are left out."""
        found = {}
        for name, points in self.series.items():
            kept = [
                point
                for point in points
                if math.isfinite(point.x)
                and math.isfinite(point.y)
                and (point.x > 0 or not self.x_log)
                and (point.y > 0 or not self.y_log)
            ]
            if kept:
                found[name] = sorted(kept, key=lambda point: point.x)
        return found

    def svg(self) -> str:
        """The plot, without its legend; empty text if there is nothing to draw."""
        series = self.shown()
        if not series:
            return ""
        points = [point for each in series.values() for point in each]
        across = Axis([point.x for point in points], LEFT, WIDTH - RIGHT, self.x_log, base=2)
        heights = [point.y for point in points] + [line for line in self.lines if line > 0 or not self.y_log]
        up = Axis(heights, HEIGHT - BOTTOM, TOP, self.y_log, base=10)
        parts = []
        for value in across.ticks():
            x = across.place(value)
            parts.append(f'<line class="grid" x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{HEIGHT - BOTTOM}"/>')
            parts.append(f'<text class="tick" x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}">{number(value)}</text>')
        for value in up.ticks():
            y = up.place(value)
            parts.append(f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>')
            parts.append(f'<text class="tick left" x="{LEFT - 6}" y="{y + 4:.1f}">{number(value)}</text>')
        for value in self.lines:
            y = up.place(value)
            parts.append(f'<line class="mark" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>')
        middle = (TOP + HEIGHT - BOTTOM) / 2
        parts.append(
            f'<text class="label" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}">{escape(self.x_label)}</text>'
            f'<text class="label" transform="translate(14 {middle}) rotate(-90)">{escape(self.y_label)}</text>'
        )
        for name, each in series.items():
            places = [(across.place(point.x), up.place(point.y)) for point in each]
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            parts.append(f'<g class="{self.style_of(name)}"><polyline points="{line}"/>')
            for point, (x, y) in zip(each, places, strict=True):
                about = f"{name}: {point.about or f'{number(point.x)}, {number(point.y)}'}"
                parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"><title>{escape(about)}</title></circle>')
            parts.append("</g>")
        return (
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(self.title)}">{"".join(parts)}</svg>'
        )

    def legend(self) -> str:
        """The names of the series, each behind a piece of its line."""
        items = [
            f'<li><svg viewBox="0 0 28 10" class="key"><g class="{self.style_of(name)}"><polyline points="1,5 27,5"/>'
            f'<circle cx="14" cy="5" r="3"/></g></svg>{escape(name)}</li>'
            for name in self.shown()
        ]
        return f'<ul class="legend">{"".join(items)}</ul>'

    def style_of(self, name: str) -> str:
        index = list(self.palette or self.series).index(name)
        return f"s{index % COLOURS}" + (" dashed" if index >= COLOURS else "")


class Axis:
    """Where values lie between the pixels `low` and `high`, with a little room at both ends."""

    def __init__(self, values: Sequence[float], low: float, high: float, log: bool, base: int):
        self.low, self.high, self.log, self.base = low, high, log, base
        first, last = min(values), max(values)
        if log:
            first, last = math.log(first, base), math.log(last, base)
        elif first > 0 and first < 0.6 * last:
            first = 0.0  # a linear axis that can begin at zero does
        room = 0.04 * (last - first) or (0.1 * abs(last) or 1.0)
        self.first = first if not log and first == 0.0 else first - room
        self.last = last + room

    def place(self, value: float) -> float:
        at = math.log(value, self.base) if self.log else value
        return self.low + (at - self.first) / (self.last - self.first) * (self.high - self.low)

    def ticks(self) -> list[float]:
        """Round values inside of the axis: about six, or powers of the base."""
        if not self.log:
            step = nice((self.last - self.first) / 6)
            count = math.floor(self.last / step + 1e-9) - math.ceil(self.first / step - 1e-9)
            start = math.ceil(self.first / step - 1e-9)
            return [(start + index) * step for index in range(count + 1)]
        powers = range(math.ceil(self.first - 1e-9), math.floor(self.last + 1e-9) + 1)
        if len(powers) >= 3 or self.base == 2:
            every = max(1, math.ceil(len(powers) / 10))
            return [float(self.base) ** power for power in powers][::every]
        between = range(math.floor(self.first), math.ceil(self.last) + 1)
        candidates = [digit * 10.0**power for power in between for digit in (1, 2, 3, 5, 7)]
        found = [value for value in candidates if self.first <= math.log10(value) <= self.last]
        if len(found) >= 2:
            return found
        low, high = 10**self.first, 10**self.last  # less than a factor of 1.5: as on a linear axis
        step = nice((high - low) / 5)
        return [index * step for index in range(math.ceil(low / step), math.floor(high / step) + 1)]


def nice(step: float) -> float:
    """The next of 1, 2, 2.5, 5, 10 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= step * (1 - 1e-9))


def number(value: float | None) -> str:
    """A number for people, in at most about four digits."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e6 or size < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"
