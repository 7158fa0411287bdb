"""The page: a template that escapes whatever it is given, one style sheet, one small script."""

import base64
import hashlib
import math
from collections import Counter
from dataclasses import dataclass

import jinja2
import msgspec

import paceline
from paceline.corpus.lint.findings import is_usable
from paceline.corpus.lint.gallery import ENDS
from paceline.corpus.lint.languages import MOST
from paceline.corpus.lint.lint import Lint, trained_samples
from paceline.corpus.lint.measure import histogram, mean, percentile
from paceline.corpus.lint.reasons import words_of
from paceline.corpus.lint.shown import shortened
from paceline.corpus.lint.text import SIZES, covered, lengths, ranked, splits
from paceline.corpus.lint.wording import Finding, percent
from paceline.recipe.sources import name_of
from paceline.rows.language import LEAST_LETTERS
from paceline.rows.overlap import GRAM
from paceline.watch.words import counted, number

MARK = b"<!doctype html>\n<!-- A data lint of paceline."
"""How a page is told from one that somebody else wrote."""

_RAW = 1500
"""Characters shown of a row that was left out."""

_CHART_WIDTH, _CHART_HEIGHT = 640, 200


@dataclass(frozen=True)
class Bar:
    """One bar of a histogram, in the chart's units."""

    x: float
    width: float
    y: float
    height: float
    title: str


@dataclass(frozen=True)
class Chart:
    """A histogram."""

    title: str
    bars: list[Bar]
    last: int
    """The largest value, at the right end."""
    most: int
    """The highest bar."""


def render(result: Lint, found: list[Finding]) -> bytes:
    """The whole page, UTF-8; it loads nothing from anywhere, and its policy forbids it to."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("paceline.corpus.lint"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "count": lambda value: f"{value:,}",
        "short": number,
        "counted": counted,
        "quoted": _quoted,
        "json": lambda value: msgspec.json.encode(value).decode(),
    }
    script = _file(environment, "script.js")
    sources = [source.name for source in result.tally.sources]
    measure = result.measure
    page = environment.get_template("page.html").render(
        lint=result,
        tally=result.tally,
        corpus=result.recipe.corpus,
        samples=trained_samples(result),
        rows=sum(s.accepted for s in result.tally.sources if s.name not in result.heldout),
        found=found,
        usable=is_usable(found),
        levels=[f.level for f in found],
        percent=percent,
        words=words_of,
        shortened=lambda text: shortened(text, _RAW),
        source_tags={name: f"s{number}" for number, name in enumerate(sources)},
        reason_tags={reason.code: f"r{number}" for number, reason in enumerate(result.reasons)},
        first=next((s for s in result.samples if s.trained or result.prompts_only), None),
        label_tags={label: f"l{number}" for number, label in enumerate(ENDS)},
        limits={name_of(s): s.limit for s in result.recipe.corpus.sources},
        splits=splits(result),
        charts=[_chart(name, counts) for name, counts in lengths(result)],
        lengths=[
            (f"{name}s", counts, [percentile(counts, share) for share in (0.5, 0.9, 0.99, 1.0)])
            for name, counts in lengths(result)
        ],
        mean=mean,
        median=lambda counts: percentile(counts, 0.5),
        turns=sorted(measure.turns.items())[:12],
        languages={name: ranked(counts) for name, counts in result.languages.items()},
        most_looked_at=MOST,
        least_letters=LEAST_LETTERS,
        coverage=[(size, covered(result, size)) for size in SIZES],
        curve=_curve(result),
        distinct=int((result.coverage.counts() > 0).sum()),
        trained=int(result.coverage.counts().sum()),
        gram=GRAM,
        visible=_visible,
        width=_CHART_WIDTH,
        height=_CHART_HEIGHT,
        version=paceline.__version__,
        style=_file(environment, "style.css"),
        script=script,
        hash=_hash(script),
    )
    # A row may quote half a character, which no encoding has.
    return page.encode("utf-8", errors="replace")


def _chart(name: str, counts: Counter[int]) -> Chart:
    bars = histogram(counts)
    most = max((count for *_, count in bars), default=0)
    width = _CHART_WIDTH / max(1, len(bars))
    return Chart(
        title=f"{name.capitalize()}s by tokens",
        bars=[
            Bar(
                x=round(i * width + 1, 2),
                width=round(width - 2, 2),
                y=round(_CHART_HEIGHT * (1 - count / most), 2),
                height=round(_CHART_HEIGHT * count / most, 2),
                title=f"{low:,} to {high:,} tokens: {count:,}",
            )
            for i, (low, high, count) in enumerate(bars)
            if count
        ],
        last=bars[-1][1] if bars else 0,
        most=most,
    )


def _curve(result: Lint) -> list[tuple[float, float, str]]:
    """Points of the coverage curve, x by the logarithm of the number of ids, with their titles."""
    points = list(result.coverage.curve().items())
    if not points:
        return []
    first, last = points[0][0], max(points[-1][0], SIZES[-1])
    if points[-1][0] < last:
        points.append((last, 1.0))
    scale = math.log2(last / first)
    return [
        (
            round(_CHART_WIDTH * math.log2(size / first) / scale, 2),
            round(_CHART_HEIGHT * (1 - share), 2),
            f"{size:,} tokens cover {int(share * 1000) / 10:.1f} %",
        )
        for size, share in points
    ]


def _quoted(text: str) -> list[str]:
    """A sentence in parts: every second one stands between backticks."""
    parts = text.split("`")
    return parts if len(parts) % 2 else [text]


def _visible(text: str) -> str:
    """A token by its text, white space spelled out."""
    return text.replace("\n", "↵").replace("\t", "⇥").replace(" ", "␣") or "(nothing)"


def _file(environment: jinja2.Environment, name: str) -> str:
    return jinja2.PackageLoader("paceline.corpus.lint").get_source(environment, name)[0]


def _hash(script: str) -> str:
    """For the page's policy: no script runs but this one."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
