"""The rows in quarantine: how many for which reason, and some of each."""

import hashlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import msgspec

from paceline.corpus.lint.lowest import Lowest

EXAMPLES = 3
"""Rows shown of each reason, those of the lowest hash."""


class Row(msgspec.Struct, frozen=True):
    """One row that was left out, as `corpus/quarantine.py` writes it."""

    source: str
    file: str
    line: int
    reason: str
    detail: str
    raw: str
    """Its beginning."""
    raw_bytes: int


@dataclass(frozen=True)
class Reason:
    """All rows that were left out for one reason."""

    code: str
    count: int
    sources: dict[str, int]
    examples: tuple[Row, ...]


def read_reasons(quarantine: Path) -> list[Reason]:
    """Stream a quarantine; the most frequent reason first."""
    sources: dict[str, Counter[str]] = {}
    examples: dict[str, Lowest[Row]] = {}
    decoder = msgspec.json.Decoder(Row)
    with quarantine.open("rb") as lines:
        for line in lines:
            row = decoder.decode(line)
            sources.setdefault(row.reason, Counter())[row.source] += 1
            examples.setdefault(row.reason, Lowest(EXAMPLES)).add(_key(row), row)
    codes = sorted(sources, key=lambda code: (-sources[code].total(), code))
    return [
        Reason(
            code=code,
            count=sources[code].total(),
            sources=dict(sources[code].most_common()),
            examples=tuple(examples[code].items()),
        )
        for code in codes
    ]


def _key(row: Row) -> str:
    text = f"{row.source}\0{row.raw}".encode("utf-8", "surrogatepass")
    return hashlib.sha256(text).hexdigest()
