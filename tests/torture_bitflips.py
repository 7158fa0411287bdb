"""Single flipped bits in everything that an extraction leaves behind: none may pass as valid.

The tests run some hundred flips, `make torture` 10,000.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from feature_samples import random_features
from feature_stores import published
from paceline.durable.checksum import crc64_hex
from paceline.durable.errors import IntegrityError, JournalDamaged
from paceline.durable.journal import Journal, fold
from paceline.durable.store import LocalStore, Stat
from paceline.features import manifest as manifests
from paceline.features.codec import Codec
from paceline.features.header import read_header
from paceline.features.plan import unit_key
from paceline.features.shard import Shard, write_shard

CODECS: tuple[Codec, ...] = ("none", "planes", "int8o")

_LENGTHS = [7, 2, 9]
_RECORDS = 12

Flip = Callable[[int], str | None]
"""Check the object with this bit flipped; what was accepted, or None."""


@dataclass
class Flips:
    """What became of the flips."""

    seed: int
    done: Counter[str] = field(default_factory=Counter)
    """Flips by what was flipped."""

    accepted: list[str] = field(default_factory=list)
    """Flips that passed as valid; must be empty."""


def bit_flips(
    folder: Path, *, count: int, seed: int, verify: Callable[[Shard], Stat] = Shard.verify
) -> Flips:
    """Flip `count` bits, one at a time, over shards of each codec, headers, manifest and journal.

    Half of a shard's flips fall into its header, however small that is. `verify` is what checks
    a shard's bytes: a sabotaged one shows in `accepted`.
    """
    rng = random.Random(seed)
    flips = Flips(seed)
    targets = list(_targets(folder, verify))
    for n in range(count):
        name, bits, check = targets[n % len(targets)]
        bit = rng.randrange(bits)
        flips.done[name] += 1
        found = check(bit)
        if found is not None:
            flips.accepted.append(f"{name}, bit {bit}: {found}")
    return flips


def _targets(folder: Path, verify: Callable[[Shard], Stat]) -> Iterator[tuple[str, int, Flip]]:
    for codec in CODECS:
        store = LocalStore(folder / codec)
        path = store.path(unit_key(0))
        features = random_features(_LENGTHS, hidden=32)
        stat = write_shard(path, features, fingerprint="f" * 32, codec=codec)
        header = Shard(path).header
        check = _shard_check(path, stat, verify)
        yield f"{codec} shard", 8 * stat.size, check
        yield f"{codec} shard's header", 8 * header.data_start, check
        yield f"{codec} header, read alone", 8 * header.data_start, _header_check(store, stat)
    manifest, _ = published(folder / "manifest", [_LENGTHS, [3]])
    data = manifests.encode(manifest)
    yield "manifest", 8 * len(data), lambda bit: _manifest_flip(data, bit)
    records = _journal(folder / "journal.jsonl")
    yield "journal", 8 * len(records), lambda bit: _journal_flip(records, bit)


def _shard_check(path: Path, stat: Stat, verify: Callable[[Shard], Stat]) -> Flip:
    def check(bit: int) -> str | None:
        with _flipped(path, bit):
            try:
                shard = Shard(path)
                found = verify(shard)
            except IntegrityError:
                return None
        # Whole, but not what the manifest lists: the reader refuses that.
        return "verified as it was written" if found == stat else None

    return check


def _header_check(store: LocalStore, stat: Stat) -> Flip:
    def check(bit: int) -> str | None:
        with _flipped(store.path(unit_key(0)), bit):
            try:
                header = read_header(store, unit_key(0), stat.size)
            except IntegrityError:
                return None
        return "promises the object in the journal" if header.promised == stat else None

    return check


def _manifest_flip(data: bytes, bit: int) -> str | None:
    try:
        manifests.decode(_with_flip(data, bit), "manifest")
    except IntegrityError:
        return None
    return "read as a manifest"


def _journal(path: Path) -> bytes:
    with Journal(path) as journal:
        for n in range(_RECORDS):
            journal.append(
                {
                    "kind": ("staged", "verified")[n % 2],
                    "key": unit_key(n // 2),
                    "fingerprint": "f" * 32,
                    "size": 1000 + n,
                    "crc64": crc64_hex(n * 0x9E3779B97F4A7C15 % 2**64),
                    "samples": 3,
                }
            )
    return path.read_bytes()


def _journal_flip(data: bytes, bit: int) -> str | None:
    wanted = fold(data, Path("journal")).records
    # A lost line end before the last record joins the two: both are then the torn tail.
    in_tail = bit // 8 >= data.rstrip(b"\n").rfind(b"\n")
    try:
        found = fold(_with_flip(data, bit), Path("journal")).records
    except JournalDamaged:
        return "the last record's flip is not read as a torn tail" if in_tail else None
    if not in_tail:
        return "read as if nothing had been damaged before its end"
    tail = len(wanted) - len(found)
    if tail not in (1, 2) or found != wanted[: len(found)]:
        return f"gave {len(found)} records that are not those written"
    return None


class _flipped:  # noqa: N801 - used like a function
    """A file with one bit flipped, for a while."""

    def __init__(self, path: Path, bit: int) -> None:
        self._path, self._bit = path, bit

    def _flip(self) -> None:
        with self._path.open("r+b") as file:
            file.seek(self._bit // 8)
            byte = file.read(1)[0]
            file.seek(self._bit // 8)
            file.write(bytes([byte ^ 1 << self._bit % 8]))

    def __enter__(self) -> None:
        self._flip()

    def __exit__(self, *_: object) -> None:
        self._flip()


def _with_flip(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)
