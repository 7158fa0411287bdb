"""The charts as Plotly figures: plain data, drawn by Plotly's own script in the reader's browser.

A colour is named as `var(--name)`; the page's script puts in what the style sheet says for the
light or dark scheme.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.report.collect import RunView
from paceline.report.result import Number
from paceline.watch.words import ordered

Figure = dict[str, Any]

TREES = 4
"""Colours of draft trees, by rising budget; with more trees some share one."""

_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star")


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One chart of the page."""

    name: str
    title: str
    figure: Figure
    label: str
    """What the chart shows, in words, for those who do not see it."""
    caption: str = ""


def layout_of(x: str, y: str, *, height: int, legend: bool = True) -> Figure:
    """What all charts share; `x` and `y` are the titles of the axes, `height` is in pixels."""
    axis = {
        "gridcolor": "var(--grid)",
        "linecolor": "var(--grid)",
        "zeroline": False,
        "automargin": True,
        "ticks": "",
    }
    layout: Figure = {
        "height": height,
        "margin": {"l": 56, "r": 12, "t": 8, "b": 44},
        "paper_bgcolor": "var(--panel)",
        "plot_bgcolor": "var(--panel)",
        "font": {"family": "system-ui, sans-serif", "size": 13, "color": "var(--ink)"},
        "xaxis": {**axis, "title": {"text": x, "font": {"size": 13}}, "showgrid": False},
        "yaxis": {**axis, "title": {"text": y, "font": {"size": 13}}},
        "hovermode": "x unified",
        "hoverlabel": {"bgcolor": "var(--page)", "font": {"color": "var(--ink)"}},
        "showlegend": legend,
    }
    if legend:
        layout["legend"] = {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"}
    return layout


def method_styles(view: RunView, names: Sequence[str]) -> dict[str, Figure]:
    """Line and marker of each method: the same tree has the same colour in every chart."""
    known = {name for tau in view.training.evaluations.values() for name in tau}
    known |= {*(view.result.pooled if view.result else ())}
    trees = [name for name in ordered(known) if name != "chain"]
    styles: dict[str, Figure] = {}
    for name in names:
        place = trees.index(name) if name in trees else -1
        if place < 0:
            colour = "var(--chain)"
        else:
            colour = f"var(--t{1 + place * (TREES - 1) // max(len(trees) - 1, TREES - 1)})"
        styles[name] = {
            "line": {"color": colour, "width": 2},
            "marker": {"color": colour, "size": 8, "symbol": _SYMBOLS[(place + 1) % len(_SYMBOLS)]},
        }
    return styles


def json_values(values: Iterable[Number]) -> list[Number]:
    """What is not finite becomes a gap."""
    return [v if v is not None and math.isfinite(v) else None for v in values]


def in_words(value: Number) -> str:
    """For a sentence."""
    return "unknown" if value is None or not math.isfinite(value) else f"{value:.3f}"
