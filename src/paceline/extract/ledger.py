"""Which units are done: what the journal says of them, and what the store proves."""

import errno
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from paceline.durable.checksum import crc64, crc64_hex
from paceline.durable.depot import Judge
from paceline.durable.errors import DataError, ShardDamaged
from paceline.durable.limit import mapped
from paceline.durable.store import Stat, Store
from paceline.durable.unit_records import staged_units
from paceline.features.header import Header, read_header
from paceline.features.manifest import Manifest
from paceline.features.plan import Unit
from paceline.types.rows import Rows, read_tokens

UNIT_PREFIX = "unit-"
"""What the key of every unit begins with."""

_GONE = "recorded as done, but gone"

_VERIFIED = "verified"
_BLOCK = 8 << 20


@dataclass(frozen=True)
class Recorded:
    """What a journal says of the units of one extraction, by key."""

    verified: dict[str, Stat]
    """As they were when they were last verified, in that order."""

    staged: dict[str, Stat]
    """Made, and last heard of on their way to the store."""

    failed: dict[str, tuple[str, ...]]
    """Why each attempt failed since the unit was last verified, oldest first."""

    quarantined: dict[str, str]
    """Given up, and why; not verified since."""


@dataclass(frozen=True)
class Survey:
    """What stands in the store."""

    done: dict[int, Stat]
    """Proven units by index."""

    redo: dict[str, str]
    """Objects that are there, or should be, and prove nothing: key to reason."""

    adopted: dict[int, Stat]
    """Of `done`: those that no record knows as they are, made by another machine or before a
    journal was lost.

    Recording them spares the next start the proof.
    """

    staged: dict[str, Stat]
    """Not in the store, but recorded as staged: the bytes may still wait there."""

    foreign: tuple[str, ...]
    """Objects named like units that the plan does not know; they are left alone."""

    @property
    def gone(self) -> set[str]:
        """Keys of `redo` under which there is nothing."""
        return {key for key, reason in self.redo.items() if reason == _GONE}

    @property
    def bad(self) -> set[str]:
        """Keys of `redo` under which there is something."""
        return self.redo.keys() - self.gone


def recorded(records: Iterable[Mapping[str, Any]], fingerprint: str) -> Recorded:
    """Fold a journal's records; those of other fingerprints, and of other things, are passed by."""
    records = list(records)
    verified: dict[str, Stat] = {}
    failed: dict[str, tuple[str, ...]] = {}
    quarantined: dict[str, str] = {}
    for record in records:
        if record.get("fingerprint") != fingerprint or "key" not in record:
            continue
        key = record["key"]
        match record.get("kind"):
            case "verified":
                verified.pop(key, None)
                verified[key] = Stat(record["size"], int(record["crc64"], 16))
                failed.pop(key, None)
                quarantined.pop(key, None)
            case "failed":
                failed[key] = (*failed.get(key, ()), str(record["reason"]))
            case "quarantined":
                quarantined[key] = str(record["reason"])
    units = (r for r in records if r.get("kind") in ("staged", "verified"))
    return Recorded(verified, staged_units(units, fingerprint), failed, quarantined)


def verified_record(unit: Unit, stat: Stat, fingerprint: str) -> dict[str, Any]:
    """What a journal holds of a unit that is done."""
    return {
        "kind": _VERIFIED,
        "key": unit.key,
        "fingerprint": fingerprint,
        "samples": unit.stop - unit.start,
        "size": stat.size,
        "crc64": crc64_hex(stat.crc64),
    }


def survey(
    records: Iterable[Mapping[str, Any]],
    store: Store,
    units: Sequence[Unit],
    rows: Rows,
    fingerprint: str,
    *,
    source: Path,
    is_shared: bool = False,
    deep: bool = False,
    deep_bytes: int = 0,
    threads: int = 16,
    on_proven: Callable[[int], None] | None = None,
) -> Survey:
    """Compare a journal's records with the store.

    The store is listed once, and of each listed unit the header is read, by `threads` threads. A
    recorded unit is done where the header, which holds the checksums of all tensors, promises the
    very size and checksum that were recorded. An unrecorded one is done where it was made by this
    extraction of just these samples, and its token ids are those of the corpus file `source`:
    those bytes are read and compared. `deep` reads every byte of both and checks that the header
    keeps its promise; otherwise up to `deep_bytes` are read so, first of units without a record,
    then of those recorded last. Everything else under a unit's name is to be redone, whatever it
    is. In a store that `is_shared` another machine may have replaced a recorded unit at the same
    moment: one that is not as it was recorded is looked at as if it were not recorded. `on_proven`
    is called for each proven unit, with the number of them so far.

    Raises what reading the store raises, and DataError where `source` is not what `rows` indexes.
    """
    said = recorded(records, fingerprint)
    listed = {found.key: found.size for found in store.list(UNIT_PREFIX)}
    sizes = {key: stat.size for key, stat in said.verified.items() if key in listed}
    # What no record vouches for comes first.
    sizes |= {key: size for key, size in listed.items() if key not in sizes}
    read = listed.keys() if deep else _last(sizes, deep_bytes)
    content = _Content(rows, source)
    judge = _Judge(
        store, fingerprint, listed, said.verified, deep=read, content=content, is_shared=is_shared
    )
    there = [unit for unit in units if unit.key in listed]
    done: dict[int, Stat] = {}
    adopted: dict[int, Stat] = {}
    reasons: dict[str, str] = {}
    for unit, verdict in zip(there, mapped(judge.unit, there, threads), strict=True):
        if isinstance(verdict, str):
            reasons[unit.key] = verdict
            continue
        done[unit.index] = verdict
        if on_proven is not None:
            on_proven(len(done))
        if said.verified.get(unit.key) != verdict:
            adopted[unit.index] = verdict
    redo: dict[str, str] = {}
    staged: dict[str, Stat] = {}
    for unit in units:
        if unit.key in reasons:
            redo[unit.key] = reasons[unit.key]
        elif unit.key not in listed:
            if unit.key in said.staged:
                staged[unit.key] = said.staged[unit.key]
            elif unit.key in said.verified:
                redo[unit.key] = _GONE
    foreign = tuple(sorted(listed.keys() - {unit.key for unit in units}))
    return Survey(done, redo, adopted, staged, foreign)


def unit_judge(
    store: Store,
    units: Iterable[Unit],
    rows: Rows,
    fingerprint: str,
    *,
    source: Path,
    bad: AbstractSet[str],
) -> Judge:
    """What tells, while units are made, whether one of them stands in the store by now.

    It is judged as `survey` judges what no record knows. Of those whose keys are `bad`, since
    something else was found there, every byte is read: another process may have mended it. The
    judge raises what reading the store raises, and DataError.
    """
    by_key = {unit.key: unit for unit in units}
    content = _Content(rows, source)

    def judge(key: str, size: int) -> Stat | None:
        if key not in by_key:
            return None
        deep = {key} & bad
        found = _Judge(store, fingerprint, {key: size}, {}, deep=deep, content=content)
        verdict = found.unit(by_key[key])
        return None if isinstance(verdict, str) else verdict

    return judge


def is_intact(
    manifest: Manifest,
    store: Store,
    *,
    deep: bool = False,
    deep_bytes: int = 0,
    threads: int = 16,
) -> bool:
    """Whether every object of a published manifest is there as listed.

    `deep` reads all bytes; otherwise up to `deep_bytes` of the last units are read.
    """
    wanted = {unit.key: Stat(unit.size, int(unit.crc64, 16)) for unit in manifest.units}
    listed = {found.key: found.size for found in store.list(UNIT_PREFIX)}
    if any(listed.get(key) != stat.size for key, stat in wanted.items()):
        return False
    read = wanted.keys() if deep else _last(listed, deep_bytes)
    judge = _Judge(store, manifest.fingerprint, listed, wanted, deep=read)
    verdicts = mapped(judge.recorded, list(wanted), threads)
    return all(not isinstance(verdict, str) for verdict in verdicts)


def holds(store: Store, key: str, stat: Stat) -> bool:
    """Whether every byte of an object is what it was; reads them all."""
    value = 0
    for start in range(0, stat.size, _BLOCK):
        value = crc64(store.get_range(key, start, min(stat.size, start + _BLOCK)), value)
    return value == stat.crc64


def is_readable(store: Store, key: str, stat: Stat) -> bool:
    """As `holds`, and False for an object that is gone or lies on a bad block."""
    try:
        return holds(store, key, stat)
    except (KeyError, ValueError):
        return False
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return False


def _last(sizes: Mapping[str, int], limit: int) -> set[str]:
    """Keys from the last on, as long as their bytes stay within `limit`."""
    chosen: set[str] = set()
    for key in reversed(list(sizes)):
        limit -= sizes[key]
        if limit < 0:
            break
        chosen.add(key)
    return chosen


@dataclass(frozen=True)
class _Content:
    """What units are made of."""

    rows: Rows
    source: Path


class _Judge:
    """Says of an object what it proves: its size and checksum, or why it has to be redone."""

    def __init__(
        self,
        store: Store,
        fingerprint: str,
        listed: Mapping[str, int],
        wanted: Mapping[str, Stat],
        *,
        deep: Collection[str],
        content: _Content | None = None,
        is_shared: bool = False,
    ) -> None:
        self._store, self._fingerprint, self._deep = store, fingerprint, deep
        self._listed, self._wanted = listed, wanted
        self._content, self._is_shared = content, is_shared

    def unit(self, unit: Unit) -> Stat | str:
        return self._judge(unit.key, unit)

    def recorded(self, key: str) -> Stat | str:
        return self._judge(key, None)

    def _judge(self, key: str, unit: Unit | None) -> Stat | str:
        size, wanted = self._listed[key], self._wanted.get(key)
        if size == 0:
            return "empty"
        try:
            header = read_header(self._store, key, size)
            reason = self._other_object(key, header, wanted, unit)
            if (
                reason is None
                and key in self._deep
                and not holds(self._store, key, header.promised)
            ):
                reason = _torn(size, header.promised)
        except ShardDamaged:
            return _torn(size, wanted)
        except (KeyError, ValueError):
            return "gone or cut off while it was read"
        except OSError as error:
            # A bad block is one object's; anything else is the disk's, and ends the survey.
            if error.errno != errno.EIO:
                raise
            return f"cannot be read ({error.strerror})"
        return header.promised if reason is None else reason

    def _other_object(
        self, key: str, header: Header, wanted: Stat | None, unit: Unit | None
    ) -> str | None:
        if header.fingerprint != self._fingerprint:
            return f"made by another extraction (fingerprint {header.fingerprint})"
        if header.promised == wanted:
            held = len(header.sample_ids)
            if unit is not None and held != unit.stop - unit.start:
                return f"not of the plan's samples ({held} of {unit.stop - unit.start})"
            return None
        if wanted is not None and not self._is_shared:
            return "not the one that was recorded"
        assert unit is not None, "a unit without a record is judged by the corpus"
        unknown = "not recorded" if wanted is None else "not the one that was recorded"
        return self._other_content(key, header, unit, unknown)

    def _other_content(self, key: str, header: Header, unit: Unit, unknown: str) -> str | None:
        assert self._content is not None
        rows, source = self._content.rows, self._content.source
        if header.sample_ids != rows.sample_ids.take(unit.samples):
            return f"{unknown}, and made of other samples than the plan has"
        tokens = _tokens(rows, source, unit)
        for name, data in tokens.items():
            entry = header.entries.get(name)
            if entry is None or int(entry.crc64, 16) != crc64(data):
                return f"{unknown}, and made of other token ids than the corpus has"
        if key in self._deep:
            return None  # All bytes are read, and these are among them.
        # They lie next to each other, before the hidden states: one request.
        first, last = header.entries["offsets"], header.entries["input_ids"]
        found = self._store.get_range(key, first.start, last.end)
        if found != tokens["offsets"] + tokens["input_ids"]:
            return _torn(header.promised.size, header.promised)
        return None


def _tokens(rows: Rows, source: Path, unit: Unit) -> dict[str, bytes]:
    """The bytes that the corpus gives a unit's shard, by tensor."""
    order = list(unit.samples)
    offsets = np.concatenate(([0], np.cumsum(rows.lengths[order], dtype=np.int64)))
    input_ids = np.empty(offsets[-1], dtype="<i4")
    loss_mask = np.zeros(offsets[-1], dtype=np.uint8)
    bounds = pairwise(offsets.tolist())
    samples = read_tokens(source, rows.positions[order].tolist())
    for (at, end_of_sample), sample in zip(bounds, samples, strict=True):
        if at + len(sample.input_ids) != end_of_sample:
            raise DataError(
                f"{source}: sample {sample.sample_id} is not as it was. Run this again."
            )
        input_ids[at : at + len(sample.input_ids)] = sample.input_ids
        for start, end in sample.loss_spans:
            loss_mask[at + start : at + end] = 1
    return {
        "offsets": offsets.astype("<i8").tobytes(),
        "input_ids": input_ids.tobytes(),
        "loss_mask": loss_mask.tobytes(),
    }


def _torn(size: int, wanted: Stat | None) -> str:
    if wanted is None:
        return f"torn or damaged ({size} bytes)"
    if size != wanted.size:
        return f"torn or damaged ({size} of {wanted.size} bytes)"
    return f"torn or damaged (all {size} bytes are there, a checksum does not hold)"
