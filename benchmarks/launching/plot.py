"""Bars of seconds, on a logarithmic scale, as SVG. Imports only the standard library."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Protocol
from xml.sax.saxutils import escape

__all__ = ["Bar", "bars"]

_WIDTH, _LABELS, _ROW, _TOP = 860, 300, 22, 30
_TICKS = (0.5, 1, 2, 5, 10, 20, 50, 100)
_OURS, _OTHERS, _INK = "#2a78d6", "#8a8f98", "#333333"


class Bar(Protocol):
    """What is drawn: one bar of ``others`` for each peer and strategy, and one of all of ``ours`` for the strategy."""

    peer: str
    strategy: str
    ours: list[float]
    others: list[float]


def bars(figures: Sequence[Bar]) -> str:
    """The picture: for each strategy ours, then the others, medians of seconds."""
    rows = list(_rows(figures))
    height = _TOP + _ROW * len(rows) + 34
    lowest, highest = min(_TICKS), max([*_TICKS[:4], *(seconds for _, seconds, _ in rows)])

    def at(seconds: float) -> float:
        share = math.log(max(seconds, lowest) / lowest) / math.log(highest / lowest)
        return _LABELS + share * (_WIDTH - _LABELS - 60)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" '
        f'font-size="12" fill="{_INK}">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{_LABELS}" y="18">seconds per launch of two ranks and three steps of GRPO (logarithmic)</text>',
    ]
    bottom = _TOP + _ROW * len(rows)
    for tick in (tick for tick in _TICKS if tick <= highest):
        x = at(tick)
        lines.append(f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{bottom}" stroke="#e3e5e8"/>')
        lines.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{tick:g}</text>')
    for index, (label, seconds, own) in enumerate(rows):
        y = _TOP + _ROW * index
        width = max(at(seconds) - _LABELS, 1)
        lines.append(f'<text x="{_LABELS - 8}" y="{y + 15}" text-anchor="end">{escape(label)}</text>')
        colour = _OURS if own else _OTHERS
        lines.append(f'<rect x="{_LABELS}" y="{y + 3}" width="{width:.1f}" height="{_ROW - 6}" fill="{colour}"/>')
        lines.append(f'<text x="{_LABELS + width + 6:.1f}" y="{y + 15}">{seconds:.2f}</text>')
    return "\n".join([*lines, "</svg>", ""])


def _rows(figures: Sequence[Bar]) -> Iterator[tuple[str, float, bool]]:
    for strategy in dict.fromkeys(each.strategy for each in figures):
        alike = [each for each in figures if each.strategy == strategy]
        ours = [seconds for each in alike for seconds in each.ours]
        yield f"{strategy}: ours, warm", statistics.median(ours), True
        for each in alike:
            yield f"{strategy}: {each.peer}", statistics.median(each.others), False
