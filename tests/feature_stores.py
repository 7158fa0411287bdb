"""Small published feature stores for tests that need shards and no target."""

from collections.abc import Sequence
from pathlib import Path

from feature_samples import random_features, sample_of
from paceline.durable.checksum import crc64_hex
from paceline.durable.store import Store
from paceline.features.codec import Codec
from paceline.features.manifest import Manifest, UnitEntry, publish
from paceline.features.plan import unit_key
from paceline.features.shard import write_shard
from paceline.types import Features, LayerConvention

FINGERPRINT = "f" * 32


def published(
    root: Path,
    lengths: Sequence[Sequence[int]],
    *,
    store: Store | None = None,
    codec: Codec = "none",
    hidden: int = 8,
) -> tuple[Manifest, list[Features]]:
    """Publish a manifest in `root`, its shards there or in `store`.

    `lengths` are those of the samples of each shard. Returns the manifest, and the features of
    each sample in the store's order.
    """
    entries, samples = [], []
    for n, row in enumerate(lengths):
        features = random_features(row, seed=n, hidden=hidden)
        path = root / unit_key(n)
        stat = write_shard(path, features, fingerprint=FINGERPRINT, codec=codec)
        if store is not None:
            store.put(path.name, path, stat.crc64)
            path.unlink()
        found = [sample_of(features, i) for i in range(len(row))]
        entries.append(
            UnitEntry(
                key=path.name,
                size=stat.size,
                crc64=crc64_hex(stat.crc64),
                sample_ids=features.tokens.sample_ids,
                lengths=tuple(row),
                loss_tokens=tuple(int(s.tokens.loss_mask.sum()) for s in found),
            )
        )
        samples += found
    manifest = Manifest(
        fingerprint=FINGERPRINT,
        target_identity="t",
        hidden_size=hidden,
        layer_ids=(1, 3),
        layer_convention=LayerConvention.OUTPUT_AFTER_LAYER,
        last=True,
        dtype="bfloat16",
        units=tuple(entries),
        codec=codec,
        store="" if store is None else store.url,
    )
    publish(root, manifest)
    return manifest, samples
