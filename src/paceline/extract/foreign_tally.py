"""What became of each file of a foreign cache: every one is counted, once."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.extract.foreign_files import AFTER_ALL, Cache
from paceline.extract.foreign_match import Scan, TokenIndex
from paceline.features.plan import Unit
from paceline.watch.words import counted

_NAMED = 10
"""Files that are named, of each reason; the events have them all."""


@dataclass(frozen=True, kw_only=True)
class Tally:
    """Files by what became of them; together they are all that were read."""

    read: int
    used: int
    """Their samples are in shards that were imported."""

    already: int
    """Their samples are in shards that were done before."""

    left: int
    """They hold samples of shards that lack others, so the extraction makes those."""

    duplicates: tuple[str, ...]
    unmatched: tuple[str, ...]
    unreadable: Mapping[str, tuple[str, ...]]
    """Names, with what is wrong with each, by reason."""

    passed_by: int
    """Files of other names; not among those read."""

    @property
    def refused(self) -> int:
        """Files that cannot be read."""
        return sum(map(len, self.unreadable.values()))

    def numbers(self) -> dict[str, Any]:
        """For the report and the events."""
        return {
            "files_read": self.read,
            "files_used": self.used,
            "files_already": self.already,
            "files_left": self.left,
            "files_duplicate": len(self.duplicates),
            "files_unmatched": len(self.unmatched),
            "files_unreadable": {reason: len(names) for reason, names in self.unreadable.items()},
            "files_passed_by": self.passed_by,
        }

    def names(self) -> dict[str, Any]:
        """Every file that was not used, for the events."""
        return {
            "duplicates": list(self.duplicates),
            "unmatched": list(self.unmatched),
            "unreadable": {reason: list(names) for reason, names in self.unreadable.items()},
        }

    def lines(self) -> Iterator[str]:
        """For the terminal."""
        parts = [
            f"{self.used:,} used",
            f"{self.already:,} of shards that were done before" if self.already else "",
            f"{self.left:,} of shards that lack other samples" if self.left else "",
            counted(len(self.duplicates), "duplicate") if self.duplicates else "",
            f"{len(self.unmatched):,} of no sample of this corpus",
            f"{self.refused:,} unreadable",
        ]
        yield f"{counted(self.read, 'file')} read: {', '.join(filter(None, parts))}."
        if self.unmatched:
            yield f"of no sample: {_some(self.unmatched)}."
        if self.duplicates:
            yield f"duplicates, of which the first is used: {_some(self.duplicates)}."


def tally_of(
    cache: Cache,
    found: Scan,
    index: TokenIndex,
    units: Sequence[Unit],
    *,
    imported: Collection[int],
    before: Collection[int],
    failed: Mapping[int, str],
) -> Tally:
    """Put together what became of each file.

    `imported` and `before` are indices of units that are done; `failed` says by file why one that
    was matched could not be used in the end.
    """
    # 0: left, 1: done before, 2: imported now; of a file what is best for any of its samples.
    state = np.zeros(len(index.first), dtype=np.int8)
    for unit in units:
        if unit.index in imported:
            state[unit.start : unit.stop] = 2
        elif unit.index in before:
            state[unit.start : unit.stop] = 1
    places = found.place[index.first]
    best = np.full(len(cache.files), -1, dtype=np.int8)
    np.maximum.at(best, places[places >= 0], state[places >= 0])
    unreadable: dict[str, list[str]] = {}
    for number, error in found.unreadable.items():
        unreadable.setdefault(error.reason, []).append(f"{cache.name(number)}: {error.detail}")
    for number, why in failed.items():
        best[number] = -1
        unreadable.setdefault(AFTER_ALL, []).append(f"{cache.name(number)}: {why}")
    return Tally(
        read=len(cache.files),
        used=int((best == 2).sum()),
        already=int((best == 1).sum()),
        left=int((best == 0).sum()),
        duplicates=tuple(map(cache.name, found.duplicates)),
        unmatched=tuple(map(cache.name, found.unmatched)),
        unreadable={reason: tuple(names) for reason, names in unreadable.items()},
        passed_by=cache.others,
    )


def unreadable_words(tally: Tally) -> Iterator[str]:
    """A sentence for each reason."""
    for reason, names in tally.unreadable.items():
        yield f"{counted(len(names), 'file')} {reason}: {_some(names)}."


def _some(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return "; ".join(names[:_NAMED]) + (f"; and {more:,} more" if more > 0 else "")
