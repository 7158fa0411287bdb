"""The page: a template that escapes whatever it is given, one style sheet, one small script."""

import base64
import hashlib
import math
import time
from datetime import datetime
from typing import Any

import jinja2
import msgspec

import paceline
from paceline.report.collect import RunView
from paceline.report.result_charts import result_charts
from paceline.report.text import DEEPEST, Origin, SampleText, sample_text
from paceline.report.training_charts import training_charts
from paceline.watch.words import duration, named, ordered, speed_advice

MARK = b"<!doctype html>\n<!-- A report of paceline."
"""How a report is told from a page that somebody else wrote."""

NOTHING = "–"
"""Stands where there is no number."""


def render(view: RunView) -> bytes:
    """The whole page, UTF-8; it loads nothing from anywhere, and its policy forbids it to."""
    script, plotly = _file("script.js"), _plotly()
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("paceline.report"),
        autoescape=True,
        # A record of another version may lack a number: a dash stands for it.
        undefined=jinja2.ChainableUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": number,
        "count": count,
        "counted": lambda value, noun: f"{count(value)} {named(value, noun)}",
        "ordered": ordered,
        "percent": percent,
        "duration": lambda value: duration(value) if _is_number(value) else NOTHING,
        "moment": moment,
        "figure": _figure,
    }
    text = sample_text(view)
    page = environment.get_template("page.html").render(
        view=view,
        advice=_advice(view),
        charts={c.name: c for c in (*training_charts(view), *result_charts(view))},
        text=text,
        legend=_legend(text),
        version=paceline.__version__,
        now=time.time(),
        style=_file("style.css"),
        script=script,
        plotly=plotly,
        hashes=" ".join(_hash(text) for text in (script, plotly)),
    )
    # A row may quote half a character, which no encoding has.
    return page.encode("utf-8", errors="replace")


def number(value: Any, digits: int = 3, unit: str = "") -> str:
    """With so many decimals; a dash for what is no finite number."""
    if not _is_number(value):
        return NOTHING
    return f"{value:,.{digits}f}{unit}"


def count(value: Any) -> str:
    """A whole number, or a dash."""
    return f"{round(value):,}" if _is_number(value) else NOTHING


def percent(value: Any, digits: int = 1) -> str:
    """A share in per cent, or a dash."""
    return f"{100 * value:.{digits}f} %" if _is_number(value) else NOTHING


def moment(seconds: Any) -> str:
    """A time of the clock of this machine, with its zone."""
    if not _is_number(seconds):
        return NOTHING
    try:
        return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M %Z")
    except (ValueError, OverflowError, OSError):
        return NOTHING


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _figure(figure: dict[str, Any]) -> str:
    """JSON that ends no script element early, whatever names it holds."""
    text = msgspec.json.encode(figure).decode()
    return text.replace("<", "\\u003c")


def _legend(text: SampleText) -> list[tuple[Origin, str]]:
    """What the colours mean, of those depths that a token was accepted at."""
    deepest = max((o.depth for o in text.origins), default=0)
    ended = any(o.kind == "end" for o in text.origins)
    drafted = [
        (
            Origin(kind="drafted", depth=depth, round=1),
            f"drafted, depth {depth}{' and more' if depth == DEEPEST < deepest else ''}",
        )
        for depth in range(1, min(deepest, DEEPEST) + 1)
    ]
    return [
        (Origin(kind="first"), "first token, before any draft"),
        (Origin(kind="own"), "the target's own token, ends a round"),
        *drafted,
        *([(Origin(kind="end"), "end of the answer")] if ended else []),
    ]


def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    return get_plotlyjs()


def _file(name: str) -> str:
    source = jinja2.PackageLoader("paceline.report").get_source(jinja2.Environment(), name)
    return source[0]


def _hash(script: str) -> str:
    """For the page's policy: no script runs but these."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _advice(view: RunView) -> list[str]:
    known: dict[str, tuple[float, float]] = {}
    for name, cost in (view.result.cost if view.result else {}).items():
        measured, at_one = cost.speedup_wall, cost.projected.get("1")
        if measured is not None and at_one is not None:
            known[name] = (measured, at_one)
    return speed_advice(known)
