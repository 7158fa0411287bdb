"""Which units are done: the journal says so, and the bytes in the store agree."""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.durable.checksum import crc64_hex
from paceline.durable.errors import ShardDamaged
from paceline.durable.journal import Journal
from paceline.durable.store import LocalStore, Stat
from paceline.features.manifest import Manifest
from paceline.features.plan import Unit
from paceline.features.shard import Shard

_VERIFIED = "verified"


@dataclass(frozen=True)
class Survey:
    """What stands in the store."""

    done: dict[int, Stat]
    """Proven units by index."""

    redo: dict[str, str]
    """Objects that are there, or should be, and prove nothing: key to reason."""


def record_verified(journal: Journal, unit: Unit, stat: Stat, fingerprint: str) -> None:
    """Record a unit as done; returns once that is durable."""
    journal.append(
        {
            "kind": _VERIFIED,
            "key": unit.key,
            "fingerprint": fingerprint,
            "samples": unit.stop - unit.start,
            "size": stat.size,
            "crc64": crc64_hex(stat.crc64),
        }
    )


def survey(journal: Journal, store: LocalStore, units: Sequence[Unit], fingerprint: str) -> Survey:
    """Compare the journal with the store; reads every object that the plan names.

    A unit is done where its last record of this fingerprint and the object agree in size and
    checksum. Everything else under a unit's name is to be redone, whatever it is.
    """
    recorded = {
        record["key"]: Stat(record["size"], int(record["crc64"], 16))
        for record in journal.records
        if record["kind"] == _VERIFIED and record["fingerprint"] == fingerprint
    }
    done: dict[int, Stat] = {}
    redo: dict[str, str] = {}
    for unit in units:
        wanted, found = recorded.get(unit.key), store.head(unit.key)
        if wanted is None and found is None:
            continue
        if wanted is not None and wanted == found:
            done[unit.index] = wanted
        else:
            redo[unit.key] = _reason(store, unit.key, wanted, found, fingerprint)
    return Survey(done, redo)


def is_intact(manifest: Manifest, store: LocalStore) -> bool:
    """Whether every object of a published manifest is there as listed; reads them all."""
    return all(
        store.head(unit.key) == Stat(unit.size, int(unit.crc64, 16)) for unit in manifest.units
    )


def _reason(
    store: LocalStore, key: str, wanted: Stat | None, found: Stat | None, fingerprint: str
) -> str:
    if found is None:
        return "recorded as done, but gone"
    if found.size == 0:
        return "empty"
    try:
        shard = Shard(store.path(key))
        shard.verify()
    except ShardDamaged:
        if wanted is None or found.size != wanted.size:
            size = "" if wanted is None else f" of {wanted.size}"
            return f"torn or damaged ({found.size}{size} bytes)"
        return f"torn or damaged (all {found.size} bytes are there, a checksum does not hold)"
    if shard.fingerprint != fingerprint:
        return f"made by another extraction (fingerprint {shard.fingerprint})"
    if wanted is None:
        return "whole, but not recorded as done"
    return "whole, but not the one recorded"
