"""A small corpus and the store of its units, made without a target and without torch."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from paceline.durable.store import LocalStore, Stat
from paceline.extract.ledger import verified_record
from paceline.features.format import Tensor, json_text, write_tensors
from paceline.features.plan import Unit, plan_units
from paceline.features.sizes import bytes_per_token
from paceline.types.rows import Rows, index_rows, read_rows
from paceline.types.sample import Sample, encode_sample

FINGERPRINT = "f" * 32
LAYERS = (1, 3)
HIDDEN = 4
SHARD_BYTES = 1200

Change = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]


def as_is(tensors: dict[str, Tensor]) -> Mapping[str, Tensor]:
    """No change."""
    return tensors


@dataclass(frozen=True)
class UnitWorld:
    """A corpus file, its plan, and a folder for the shards."""

    source: Path
    rows: Rows
    units: tuple[Unit, ...]
    store: LocalStore
    fingerprint: str = FINGERPRINT

    def write(
        self,
        index: int,
        *,
        fingerprint: str | None = None,
        seed: int = 0,
        change: Change = as_is,
        sample_ids: tuple[str, ...] | None = None,
    ) -> Stat:
        """Write the shard of a unit as an extraction does; `change` its tensors before."""
        unit = self.units[index]
        order = list(unit.samples)
        samples = read_rows(self.source, self.rows.positions[order].tolist())
        lengths = [len(s.input_ids) for s in samples]
        total = sum(lengths)
        noise = random.Random(f"{seed}/{index}").randbytes(total * len(LAYERS) * HIDDEN * 2)
        mask = [any(b <= n < e for b, e in s.loss_spans) for s in samples for n in _places(s)]
        tensors: dict[str, Tensor] = {
            "offsets": ("I64", [len(order) + 1], _bytes(np.cumsum([0, *lengths]), "<i8")),
            "input_ids": ("I32", [total], _bytes([i for s in samples for i in s.input_ids], "<i4")),
            "taps": ("BF16", [total, len(LAYERS), HIDDEN], noise),
            "loss_mask": ("U8", [total], _bytes(mask, "u1")),
        }
        ids = self.rows.sample_ids.take(order) if sample_ids is None else sample_ids
        metadata = {
            "kind": "paceline.features",
            "version": "1",
            "fingerprint": fingerprint or self.fingerprint,
            "layer_ids": json_text(LAYERS),
            "layer_convention": "output_after_layer",
            "last": "absent",
            "sample_ids": json_text(ids),
        }
        return write_tensors(self.path(index), change(tensors), metadata)

    def write_all(self) -> dict[int, Stat]:
        """Every unit's shard."""
        return {unit.index: self.write(unit.index) for unit in self.units}

    def path(self, index: int) -> Path:
        """A unit's file."""
        return self.store.path(self.units[index].key)

    def verified(self, stats: Mapping[int, Stat]) -> list[dict[str, Any]]:
        """The records of units that are done."""
        return [verified_record(self.units[i], s, self.fingerprint) for i, s in stats.items()]


def make_world(root: Path, samples: Sequence[Sample]) -> UnitWorld:
    """Write the corpus; the store is empty."""
    root.mkdir(parents=True, exist_ok=True)
    source = root / "corpus.jsonl"
    source.write_bytes(b"".join(map(encode_sample, samples)))
    return plan_world(source, root / "features")


def plan_world(source: Path, folder: Path, fingerprint: str = FINGERPRINT) -> UnitWorld:
    """The plan of a corpus that is there."""
    rows = index_rows(source, vocab_size=None, max_position=None)
    units = plan_units(
        rows.lengths,
        bytes_per_token=bytes_per_token(len(LAYERS), HIDDEN, last=False, dtype="bfloat16"),
        shard_bytes=SHARD_BYTES,
        batch_tokens=64,
    )
    return UnitWorld(source, rows, units, LocalStore(folder), fingerprint)


def flipped(data: bytes, bit: int) -> bytes:
    """With one bit changed."""
    changed = bytearray(data)
    if bit // 8 < len(changed):  # cut off before, it has no such bit
        changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def other_tokens(tensors: dict[str, Tensor]) -> Mapping[str, Tensor]:
    """One token id is another."""
    dtype, shape, data = tensors["input_ids"]
    return {**tensors, "input_ids": (dtype, shape, flipped(bytes(data), 2))}


def other_lengths(tensors: dict[str, Tensor]) -> Mapping[str, Tensor]:
    """A token changes its sample."""
    dtype, shape, data = tensors["offsets"]
    offsets = np.frombuffer(data, dtype="<i8").copy()
    offsets[1] += 1
    return {**tensors, "offsets": (dtype, shape, offsets.tobytes())}


def other_mask(tensors: dict[str, Tensor]) -> Mapping[str, Tensor]:
    """A token is trained that was not, or the other way round."""
    dtype, shape, data = tensors["loss_mask"]
    return {**tensors, "loss_mask": (dtype, shape, flipped(bytes(data), 0))}


def relabelled(world: UnitWorld, fingerprint: str) -> UnitWorld:
    """The same, as another extraction."""
    return replace(world, fingerprint=fingerprint)


def _places(sample: Sample) -> range:
    return range(len(sample.input_ids))


def _bytes(values: Any, dtype: str) -> bytes:
    return np.asarray(values, dtype=dtype).tobytes()
