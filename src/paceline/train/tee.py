"""Captured samples kept in the run directory, so that later epochs need no target for them.

A tee serves the training and never stops it. What the disk does not take is captured again in the
next epoch; nothing waits for the disk but hidden states up to a limit, and what comes on top of
that is left out. A shard counts once the journal names it, behind its bytes; the first read in each
process verifies it, and one that proves nothing is forgotten.
"""

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from paceline.durable.checksum import crc64_hex
from paceline.durable.errors import IntegrityError, ShardDamaged, no_room
from paceline.durable.fs import REAL_FS, FileSystem
from paceline.durable.journal import Journal
from paceline.durable.room import Room
from paceline.durable.space import Space, read_space
from paceline.durable.store import Stat
from paceline.features.codec import Codec
from paceline.features.plan import tee_key
from paceline.features.shard import Shard, write_shard
from paceline.types import Features, TokenBatch
from paceline.watch.words import short_bytes

_LOG = logging.getLogger(__name__)

JOURNAL = "journal.jsonl"
_OPEN_SHARDS = 64

_REST = 60.0
"""Seconds for which nothing is kept after the disk said no."""

_LAST_WAIT = 10.0
"""Seconds that the end waits for the last shard."""

_HEADER_BYTES = 1 << 16
"""More than a shard has beside its states, apart from its ids."""


@dataclass(frozen=True, kw_only=True)
class TeePlace:
    """Where samples are kept, and how many of them may wait for that."""

    folder: Path
    fingerprint: str
    """Of the features; shards with another one are removed."""
    codec: Codec
    shard_bytes: int
    """Of hidden states before they are coded, in a file."""
    waiting_bytes: int
    """Of hidden states that may be in memory, beside those of a shard."""
    reserve: int = 0
    """Bytes of the file system that are left free, for checkpoints."""


class Tee:
    """The kept samples, by their number. `offer`, `has` and `forget` are for any thread, `read` for
    one at a time.
    """  # noqa: D205

    def __init__(
        self,
        place: TeePlace,
        ids: Sequence[str],
        *,
        fs: FileSystem = REAL_FS,
        read: Callable[[Path], Space] = read_space,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Go on with what the folder has; `ids` names the sample of each number.

        Raises OSError where the folder cannot be used, UserError where another process uses it.
        """
        self._place, self._ids, self._fs, self._clock = place, ids, fs, clock
        self._room = Room(place.folder, keeps_spare=True, read=read, clock=clock)
        self._change = threading.Condition()
        self._shards: dict[int, Stat] = {}
        self._next = 0
        self._shard_of = np.full(len(ids), -1, dtype=np.int32)
        self._row_of = np.zeros(len(ids), dtype=np.int32)
        self._held: dict[int, Features] = {}
        self._waiting: deque[int] = deque()
        self._held_bytes = self._waiting_bytes = 0
        self._rests_until = 0.0
        self._refusal: str | None = None
        self._is_over = False
        self._open: OrderedDict[int, Shard] = OrderedDict()
        self._verified: set[int] = set()
        fs.make_dirs(place.folder)
        self._journal = self._recovered()
        self._thread = threading.Thread(target=self._work, name="tee", daemon=True)
        self._thread.start()

    @property
    def is_complete(self) -> bool:
        """Whether no sample is missing."""
        return len(self) == len(self._ids)

    def __len__(self) -> int:
        """Samples that can be read."""
        with self._change:
            return int((self._shard_of >= 0).sum()) + len(self._held)

    def numbers(self) -> dict[str, int]:
        """For the record: what is on the disk."""
        with self._change:
            size = sum(stat.size for stat in self._shards.values())
            return {"kept_samples": int((self._shard_of >= 0).sum()), "kept_bytes": size}

    def sentence(self) -> str:
        """What is kept, and why others are not."""
        numbers = self.numbers()
        kept, size = numbers["kept_samples"], short_bytes(numbers["kept_bytes"])
        said = f"{kept:,} of {len(self._ids):,} samples are kept in {self._place.folder} ({size})"
        return f"{said}; last left out: {self._refusal}" if self._refusal else said

    def has(self, number: int) -> bool:
        """Whether the sample can be read."""
        with self._change:
            return self._has(number)

    def offer(self, number: int, features: Features) -> None:
        """Keep a copy of a sample's features, unless that would mean to wait."""
        size = features.num_bytes
        with self._change:
            if self._is_over or self._has(number) or self._clock() < self._rests_until:
                return
            if self._held_bytes + size > self._place.shard_bytes + self._place.waiting_bytes:
                self._refuse("samples come faster than they can be written")
                return
            # Its place is taken before the copy is made, which takes time.
            self._held_bytes += size
        copy = _joined([features])
        with self._change:
            if self._has(number):
                self._held_bytes -= size
                return
            self._held[number] = copy
            self._waiting.append(number)
            self._waiting_bytes += size
            self._change.notify_all()

    def read(self, number: int) -> Features:
        """A sample's features (N = 1), in the type at rest.

        Raises ShardDamaged, OSError and KeyError where it cannot be read, or not any more.
        """
        with self._change:
            held = self._held.get(number)
            index, row = int(self._shard_of[number]), int(self._row_of[number])
            stat = self._shards.get(index)
        if held is not None:
            return held
        if stat is None:
            raise KeyError(f"sample {self._ids[number]} is not kept")
        features = self._shard(index, stat).read(row)
        if features.tokens.sample_ids != (self._ids[number],):
            raise ShardDamaged(f"{self._path(index)} holds another sample than its journal says")
        return features

    def forget(self, number: int) -> None:
        """The shard of this sample proves nothing: remove it."""
        with self._change:
            index = int(self._shard_of[number])
            if index >= 0:
                self._drop(index)

    def close(self) -> None:
        """Keep no more, and write what waits, if the disk takes it in reasonable time.

        A second call does nothing.
        """
        with self._change:
            self._is_over = True
            self._change.notify_all()
        self._thread.join(_LAST_WAIT)
        if self._thread.is_alive():
            _LOG.warning("tee: %s does not answer; what waits for it is lost", self._place.folder)
        else:
            self._journal.close()

    def _recovered(self) -> Journal:
        """The journal, with what it names and the folder proves taken over."""
        path = self._place.folder / JOURNAL
        try:
            journal = Journal(path, fs=self._fs)
        except IntegrityError as error:
            # All that is lost with it can be captured again.
            _LOG.warning("tee: begun anew: %s", error)
            self._fs.unlink(path)
            journal = Journal(path, fs=self._fs)
        for record in journal.records:
            index = int(record["index"])
            self._next = max(self._next, index + 1)
            if record["fingerprint"] != self._place.fingerprint:
                continue
            stat = Stat(record["size"], int(record["crc64"], 16))
            with suppress(FileNotFoundError):
                if self._path(index).stat().st_size == stat.size:
                    self._add(index, record["numbers"], stat)
        known = {self._path(index) for index in self._shards}
        for left in sorted(set(self._place.folder.glob("tee-*")) - known):
            self._fs.unlink(left)
        if self._shards:
            _LOG.info(
                "tee: %s of %s samples are kept, and need no target",
                *(f"{int((self._shard_of >= 0).sum()):,}", f"{len(self._ids):,}"),
            )
        return journal

    def _has(self, number: int) -> bool:
        return bool(self._shard_of[number] >= 0) or number in self._held

    def _add(self, index: int, numbers: Sequence[int], stat: Stat) -> None:
        self._shards[index] = stat
        self._shard_of[numbers] = index
        self._row_of[numbers] = range(len(numbers))

    def _drop(self, index: int) -> None:
        self._shards.pop(index, None)
        self._open.pop(index, None)
        self._shard_of[self._shard_of == index] = -1
        with suppress(OSError):
            self._fs.unlink(self._path(index))

    def _path(self, index: int) -> Path:
        return self._place.folder / tee_key(index)

    def _shard(self, index: int, stat: Stat) -> Shard:
        if index in self._open:
            self._open.move_to_end(index)
            return self._open[index]
        shard = Shard(self._path(index))
        if index not in self._verified:
            if shard.verify() != stat:
                raise ShardDamaged(f"{shard.path} is not the shard that its journal names")
            self._verified.add(index)
        self._open[index] = shard
        if len(self._open) > _OPEN_SHARDS:
            self._open.popitem(last=False)
        return shard

    def _refuse(self, why: str) -> None:
        if self._refusal is None:
            _LOG.warning("tee: %s. What is left out is captured again in the next epoch.", why)
        self._refusal = why

    def _work(self) -> None:
        """The thread that writes."""
        while True:
            with self._change:
                while not (self._is_over or self._waiting_bytes >= self._place.shard_bytes):
                    self._change.wait()
                numbers = self._taken()
                if not numbers:
                    return
            try:
                self._write(numbers)
            except Exception as error:  # noqa: BLE001 - whatever it is, the training goes on
                if isinstance(error, OSError) and no_room(error) is not None:
                    self._room.refused(error)
                self._give_up(numbers, str(error))

    def _taken(self) -> list[int]:
        """What goes into the next shard."""
        numbers: list[int] = []
        room = self._place.shard_bytes
        while self._waiting and room > 0:
            numbers.append(self._waiting.popleft())
            room -= self._held[numbers[-1]].num_bytes
        self._waiting_bytes -= self._place.shard_bytes - room
        return numbers

    def _write(self, numbers: list[int]) -> None:
        parts = [self._held[number] for number in numbers]
        need = sum(part.num_bytes + 64 * part.tokens.input_ids.numel() for part in parts)
        reserve = self._place.reserve
        why = self._room.why_not(need + _HEADER_BYTES + reserve, 0)
        if why is not None:
            said = f" ({short_bytes(reserve)} of that for checkpoints)" if reserve else ""
            self._give_up(numbers, why + said)
            return
        index, path = self._next, self._path(self._next)
        try:
            stat = write_shard(
                path,
                _joined(parts),
                fingerprint=self._place.fingerprint,
                codec=self._place.codec,
                fs=self._fs,
            )
            self._journal.append(
                {
                    "kind": "kept",
                    "index": index,
                    "fingerprint": self._place.fingerprint,
                    "size": stat.size,
                    "crc64": crc64_hex(stat.crc64),
                    "numbers": numbers,
                }
            )
        except BaseException:
            with suppress(OSError):
                self._fs.unlink(path)
            raise
        self._room.took()
        self._next += 1
        with self._change:
            self._add(index, numbers, stat)
            self._let_go(numbers)

    def _give_up(self, numbers: list[int], why: str) -> None:
        with self._change:
            self._refuse(why)
            self._rests_until = self._clock() + _REST
            self._let_go(numbers)

    def _let_go(self, numbers: list[int]) -> None:
        for number in numbers:
            self._held_bytes -= self._held.pop(number).num_bytes


@contextmanager
def open_tee(place: TeePlace, ids: Sequence[str]) -> Iterator[Tee | None]:
    """A tee as long as it is used; None, and a warning, where the folder cannot be used."""
    try:
        tee = Tee(place, ids)
    except OSError as error:
        _LOG.warning("tee: %s. The training goes on without it.", error)
        yield None
        return
    try:
        yield tee
    finally:
        tee.close()


def _joined(parts: Sequence[Features]) -> Features:
    """A copy of them all, behind each other."""
    lengths = [n for part in parts for n in part.tokens.lengths]
    ends = torch.tensor([0, *lengths]).cumsum(0)
    lasts = [part.last for part in parts if part.last is not None]
    return Features(
        tokens=TokenBatch(
            input_ids=torch.cat([part.tokens.input_ids for part in parts]),
            loss_mask=torch.cat([part.tokens.loss_mask for part in parts]),
            offsets=ends,
            sample_ids=tuple(i for part in parts for i in part.tokens.sample_ids),
        ),
        taps=torch.cat([part.taps for part in parts]),
        last=torch.cat(lasts) if lasts else None,
        layer_ids=parts[0].layer_ids,
    )
