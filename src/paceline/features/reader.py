"""Reading a feature store sample by sample."""

import logging
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Mapping
from itertools import accumulate
from pathlib import Path

from paceline.durable.checksum import crc64_hex
from paceline.durable.errors import ShardDamaged
from paceline.durable.open_store import open_store
from paceline.durable.store import LocalStore, Store
from paceline.features.cache import ShardCache
from paceline.features.manifest import Manifest, UnitEntry, load
from paceline.features.shard import Shard
from paceline.types import Features

_LOG = logging.getLogger(__name__)

_OPEN_SHARDS = 64

_COPIES = 4
"""Copies of a shard that are fetched before the disk is held to be at fault."""


class FeatureReader:
    """The samples of a published store, numbered in the manifest's order. For one thread.

    A shard is opened and checked in full, against its own checksums and the manifest's, when its
    first sample is read. At most `_OPEN_SHARDS` are kept open: each holds a file handle. Shards
    of a store that is no folder are fetched whole into local copies (`ShardCache`), which any
    number of readers share.
    """

    def __init__(
        self,
        root: Path,
        *,
        store: Store | None = None,
        options: Mapping[str, str] | None = None,
        cache: Path | None = None,
        cache_bytes: int | None = None,
        unwanted: Callable[[], bool] = lambda: False,
    ) -> None:
        """Open the store whose manifest is in folder `root`; reads the manifest alone.

        Args:
            root: folder of the manifest, and of the shards where it names no other place.
            store: where the shards are, instead of what the manifest names.
            options: what that store's client needs beside its URL.
            cache: folder of the copies; `cache/` beside `root` unless given.
            cache_bytes: what the copies may have together; None allows half of what is free.
            unwanted: ends by its True a `read` that waits for the store; see `ShardCache`.

        Raises:
            DataError: none is published.
            IntegrityError: the manifest is damaged, or of a later version.
            UserError: the store cannot be opened as its URL and the options say.

        """
        self._root = root
        self.manifest: Manifest = load(root)
        self.digest = self.manifest.digest
        """The manifest hash, which `order` takes."""
        units = self.manifest.units
        self._starts = [0, *accumulate(len(unit.sample_ids) for unit in units)]
        self._open: OrderedDict[int, Shard] = OrderedDict()
        self._verified: dict[int, str] = {}
        self.sample_ids: tuple[str, ...] = tuple(i for u in units for i in u.sample_ids)
        self.lengths: tuple[int, ...] = tuple(n for u in units for n in u.lengths)
        """Tokens per sample."""
        self.loss_tokens: tuple[int, ...] = tuple(n for u in units for n in u.loss_tokens)
        """Trainable tokens per sample."""
        if store is None:
            named = self.manifest.store
            store = open_store(named, options) if named else LocalStore(root)
        if isinstance(store, LocalStore):
            self._files: LocalStore | ShardCache = store
        else:
            # Keys are the same in every run: the fingerprint keeps two of them apart.
            below = self.manifest.fingerprint
            folder = cache or root.parent / "cache"
            self._files = ShardCache(folder, store, below, limit=cache_bytes, unwanted=unwanted)

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def samples_per_shard(self) -> tuple[int, ...]:
        """What `windowed_order` takes."""
        return tuple(len(unit.sample_ids) for unit in self.manifest.units)

    @property
    def cache_limit(self) -> int | None:
        """Bytes that local copies may have together; None where the shards are files already."""
        return self._files.limit if isinstance(self._files, ShardCache) else None

    @property
    def num_bytes(self) -> int:
        """Bytes of all shards."""
        return sum(unit.size for unit in self.manifest.units)

    def read(self, index: int) -> Features:
        """Features of one sample (N = 1) in the type at rest.

        Raises IndexError outside [0, len), ShardDamaged naming the file, and, of a store that is
        no folder, what `ShardCache.fetch` raises.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        unit = bisect_right(self._starts, index) - 1
        return self._shard(unit).read(index - self._starts[unit])

    def _shard(self, unit: int) -> Shard:
        files, entry = self._files, self.manifest.units[unit]
        if isinstance(files, ShardCache):
            files.touch(entry.key)
        if unit in self._open:
            self._open.move_to_end(unit)
            return self._open[unit]
        if isinstance(files, ShardCache):
            shard = self._copied(files, unit, entry)
        else:
            shard = self._opened(files.path(entry.key), unit, entry)
        self._open[unit] = shard
        if len(self._open) > _OPEN_SHARDS:
            self._open.popitem(last=False)
        return shard

    def _opened(self, path: Path, unit: int, entry: UnitEntry) -> Shard:
        shard = Shard(path)
        # The header covers the tensors' checksums: the same header is the same promise.
        if self._verified.get(unit) != shard.header_crc64:
            self._verify(shard, entry)
            self._verified[unit] = shard.header_crc64
        return shard

    def _copied(self, cache: ShardCache, unit: int, entry: UnitEntry) -> Shard:
        path = cache.path(entry.key)
        for fetched in range(_COPIES + 1):
            try:
                return self._opened(path, unit, entry)
            except ShardDamaged as error:
                if fetched == _COPIES:
                    raise ShardDamaged(
                        f"{path}: fetched {_COPIES} times, and other bytes are there each time. "
                        "Look at the disk, or choose another place for the copies."
                    ) from error
                if path.exists():
                    _LOG.warning("%s: not the bytes that the manifest lists; fetched again", path)
                    cache.drop(entry.key)
            self._verified.pop(unit, None)
            cache.fetch(entry)
            self._let_go_of_removed(cache)
        raise AssertionError("the last round returns or raises")

    def _let_go_of_removed(self, cache: ShardCache) -> None:
        """Close copies that made room for others: their bytes are free only then."""
        for unit in list(self._open):
            if not cache.path(self.manifest.units[unit].key).exists():
                del self._open[unit]

    def _verify(self, shard: Shard, entry: UnitEntry) -> None:
        stat = shard.verify()
        if (stat.size, crc64_hex(stat.crc64)) != (entry.size, entry.crc64):
            raise ShardDamaged(
                f"{shard.path} is a whole shard, but not the one that the manifest lists (of "
                f"fingerprint {shard.fingerprint}, not {self.manifest.fingerprint}). Run "
                "`paceline extract` again: it redoes the shards that do not hold what its "
                "journal says."
            )
