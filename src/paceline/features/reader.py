"""Reading a feature store sample by sample."""

from bisect import bisect_right
from collections import OrderedDict
from itertools import accumulate
from pathlib import Path

from paceline.durable.checksum import crc64_hex
from paceline.durable.errors import ShardDamaged
from paceline.features.manifest import Manifest, UnitEntry, load
from paceline.features.shard import Shard
from paceline.types import Features

_OPEN_SHARDS = 64


class FeatureReader:
    """The samples of a published store, numbered in the manifest's order. For one thread.

    A shard is opened and checked in full, against its own checksums and the manifest's, when its
    first sample is read. At most `_OPEN_SHARDS` are kept open: each holds a file handle.
    """

    def __init__(self, root: Path) -> None:
        """Open the store in folder `root`; reads the manifest alone.

        Raises DataError where none is published, IntegrityError where it is damaged.
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

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def samples_per_shard(self) -> tuple[int, ...]:
        """What `windowed_order` takes."""
        return tuple(len(unit.sample_ids) for unit in self.manifest.units)

    def read(self, index: int) -> Features:
        """Features of one sample (N = 1); taps and last are views of the file, in its dtype.

        Raises IndexError outside [0, len), ShardDamaged naming the file.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        unit = bisect_right(self._starts, index) - 1
        return self._shard(unit).read(index - self._starts[unit])

    def _shard(self, unit: int) -> Shard:
        if unit in self._open:
            self._open.move_to_end(unit)
            return self._open[unit]
        entry = self.manifest.units[unit]
        shard = Shard(self._root / entry.key)
        # The header covers the tensors' checksums: the same header is the same promise.
        if self._verified.get(unit) != shard.header_crc64:
            self._verify(shard, entry)
            self._verified[unit] = shard.header_crc64
        self._open[unit] = shard
        if len(self._open) > _OPEN_SHARDS:
            self._open.popitem(last=False)
        return shard

    def _verify(self, shard: Shard, entry: UnitEntry) -> None:
        stat = shard.verify()
        if (stat.size, crc64_hex(stat.crc64)) != (entry.size, entry.crc64):
            raise ShardDamaged(
                f"{shard.path} is a whole shard, but not the one that the manifest lists (of "
                f"fingerprint {shard.fingerprint}, not {self.manifest.fingerprint}). Run "
                "`paceline extract` again: it redoes the shards that do not hold what its "
                "journal says."
            )
