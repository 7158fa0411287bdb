"""What `paceline lint` says on the terminal."""

import textwrap
from collections import Counter
from collections.abc import Iterator

from paceline.corpus.lint.lint import Lint
from paceline.corpus.lint.measure import mean, percentile
from paceline.corpus.lint.wording import Finding, percent
from paceline.types import Split
from paceline.watch.words import counted, number

Section = tuple[str, list[str]]

_WIDTH = 100
_FINDINGS = 20
_REASONS = 12
_LANGUAGES = 8
SIZES = (1024, 2048, 4096, 8192, 16384, 32768)
"""Ids for which the coverage is told."""


def sections(result: Lint, found: list[Finding]) -> Iterator[Section]:
    """Title and lines of each part, findings first."""
    yield "findings", list(_findings(found))
    files = [line for source in result.tally.sources for line in source.file_lines()]
    yield "sources", [*_table(_sources(result)), *files]
    if result.reasons:
        yield "rows left out", list(_reasons(result))
    yield "lengths", list(_table(_lengths(result)))
    yield "languages", list(_languages(result))
    if result.coverage.curve():
        yield "vocabulary", list(_vocabulary(result))


def _findings(found: list[Finding]) -> Iterator[str]:
    if not found:
        yield "nothing to complain about"
    for finding in found[:_FINDINGS]:
        yield f"{finding.level}: {finding.title}"
        if finding.level == "note":
            continue
        for text in (finding.text, f"→ {finding.advice}"):
            yield from textwrap.wrap(text, _WIDTH, initial_indent="  ", subsequent_indent="  ")
    if len(found) > _FINDINGS:
        yield f"{counted(len(found) - _FINDINGS, 'finding')} more on the page"


def _sources(result: Lint) -> Iterator[list[str]]:
    yield [
        "source", "use", "read", "accepted", "left out", "blank", "samples", "tokens", "trained",
    ]  # fmt: skip
    for source in result.tally.sources:
        yield [
            source.name,
            "evaluation" if source.name in result.heldout else "training",
            f"{source.read:,}",
            f"{source.accepted:,}",
            f"{source.quarantined:,}",
            f"{source.blank:,}",
            f"{source.samples:,}",
            number(source.tokens),
            percent(source.loss_tokens, source.tokens) if source.loss_tokens else "–",
        ]


def _reasons(result: Lint) -> Iterator[str]:
    rows = result.tally.read
    for reason in result.reasons[:_REASONS]:
        listed = ", ".join(f"{n:,} of {name}" for name, n in list(reason.sources.items())[:3])
        more = f", {len(reason.sources) - 3} more" if len(reason.sources) > 3 else ""
        yield f"{reason.count:,} {reason.code} ({percent(reason.count, rows)}): {listed}{more}"
    rest = result.reasons[_REASONS:]
    if rest:
        yield f"{sum(r.count for r in rest):,} for {counted(len(rest), 'other reason')}"


def _lengths(result: Lint) -> Iterator[list[str]]:
    yield ["tokens", "of", "mean", "50 %", "90 %", "99 %", "longest"]
    for name, counts in lengths(result):
        marks = [f"{percentile(counts, share):,}" for share in (0.5, 0.9, 0.99, 1.0)]
        yield [name, f"{counts.total():,}", f"{mean(counts):,.0f}", *marks]


def lengths(result: Lint) -> list[tuple[str, Counter[int]]]:
    """What has a length, with its counts by tokens; prompts that are whole samples once."""
    measure = result.measure
    found = [("sample", measure.lengths)]
    if not result.prompts_only:
        found += [("prompt", measure.prompts), ("answer", measure.answers)]
    return [(name, counts) for name, counts in found if counts]


def _languages(result: Lint) -> Iterator[str]:
    for source, counts in result.languages.items():
        parts = [f"{name} {percent(n, counts.total())}" for name, n in ranked(counts)[:_LANGUAGES]]
        rest = len(counts) - _LANGUAGES
        yield f"{source}: {', '.join(parts)}{f', {rest} more' if rest > 0 else ''}"


def ranked(counts: dict[str, int]) -> list[tuple[str, int]]:
    """The most frequent first; equal ones by name."""
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def _vocabulary(result: Lint) -> Iterator[str]:
    counts = result.coverage.counts()
    yield (
        f"{int((counts > 0).sum()):,} different tokens of {result.vocabulary:,} among "
        f"{int(counts.sum()):,} that are trained on"
    )
    parts = [f"{size:,} cover {covered(result, size)}" for size in SIZES]
    yield f"the most frequent {', '.join(parts)}"


def covered(result: Lint, size: int) -> str:
    """How much of the trained text the `size` most frequent tokens make up."""
    share = result.coverage.curve().get(size, 1.0)
    # Cut, not rounded: 99.96 % is not all of it.
    return "100 %" if share >= 1.0 else f"{int(share * 1000) / 10:.1f} %"


def _table(rows: Iterator[list[str]]) -> Iterator[str]:
    """Columns in line: the first to the left, those of numbers to the right."""
    lines = list(rows)
    widths = [max(len(row[i]) for row in lines) for i in range(len(lines[0]))]
    for row in lines:
        first, *others = row
        cells = [first.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        yield "  ".join(cells).rstrip()


def splits(result: Lint) -> list[tuple[str, int, int, int]]:
    """Name, samples, tokens and trained tokens of each split that has any."""
    tally = result.tally
    return [
        (split.value, tally.samples[split], tally.tokens[split], tally.loss_tokens[split])
        for split in Split
        if tally.samples[split]
    ]
