"""What was left out of the corpus: reasons with their counts, and a few rows of each."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

EXAMPLES = 3
"""Rows that are shown of each reason."""

_SHOWN = 400
"""Characters of a row that are shown."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """One row that was left out."""

    where: str
    """File and line, or the data set and the prompt's id."""
    detail: str
    text: str
    """The row, or the answer, cut to some hundred characters."""


@dataclass(kw_only=True)
class Reason:
    """Rows that one stage left out for one reason."""

    stage: str
    code: str
    count: int
    examples: list[Example] = field(default_factory=list)


class _Row(msgspec.Struct):
    """A line of either quarantine file."""

    reason: str
    source: str = ""
    file: str = ""
    line: int | None = None
    detail: str = ""
    prompt_id: str | None = None
    raw: str | None = None
    answer: str | None = None


def read_reasons(
    path: Path, stage: str, counts: Mapping[str, int] | None
) -> tuple[list[Reason], int]:
    """Reasons by falling count, and the number of lines that could not be read.

    `counts` is what the stage's record says, or None while it has not ended: then the lines are
    counted. The file is streamed, and left as soon as there is no more to learn from it.
    """
    reasons = {code: Reason(stage=stage, code=code, count=n) for code, n in (counts or {}).items()}
    wanted = sum(min(EXAMPLES, n) for n in (counts or {}).values())
    unreadable = found = 0
    if path.is_file() and (counts is None or wanted):
        with path.open("rb") as lines:
            for line in lines:
                try:
                    row = _ROW.decode(line)
                except (msgspec.MsgspecError, UnicodeError):
                    unreadable += 1
                    continue
                reason = reasons.setdefault(
                    row.reason, Reason(stage=stage, code=row.reason, count=0)
                )
                reason.count += counts is None
                if len(reason.examples) < EXAMPLES:
                    reason.examples.append(_example(row))
                    found += 1
                if counts is not None and found >= wanted:
                    break
    ordered = sorted(reasons.values(), key=lambda reason: (-reason.count, reason.code))
    return ordered, unreadable


def _example(row: _Row) -> Example:
    if row.file:
        where = f"{Path(row.file).name}, row {row.line}"
    else:
        where = f"{row.source}, prompt {(row.prompt_id or '')[:12]}"
    text = row.raw if row.raw is not None else row.answer or ""
    cut = text[:_SHOWN]
    if len(text) > _SHOWN:
        cut += " …"
    return Example(where=where, detail=row.detail, text=cut)


_ROW = msgspec.json.Decoder(_Row)
