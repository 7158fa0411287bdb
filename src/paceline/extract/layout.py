"""What an extraction's record says of its shards: how a corpus is cut, what is published."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.durable.checksum import crc64_hex
from paceline.durable.errors import IntegrityError
from paceline.durable.store import Stat
from paceline.features.codec import Codec
from paceline.features.manifest import Manifest, QuarantinedUnit, UnitEntry
from paceline.features.plan import Unit, plan_units
from paceline.features.sizes import RestDtype, bytes_per_token, unit_bytes_bound
from paceline.recipe.fingerprint import Fields
from paceline.types.layers import LayerConvention
from paceline.types.rows import Rows

JOURNAL = "journal.jsonl"
"""The journal's name in the features folder."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What decides how a corpus is cut into shards, and what a manifest says of them all."""

    target_identity: str
    hidden_size: int
    layer_ids: tuple[int, ...]
    last: bool
    dtype: RestDtype
    codec: Codec
    shard_bytes: int
    """Of hidden states as the target gives them: the codec does not move a sample."""

    @property
    def bytes_per_token(self) -> int:
        """Of hidden states before they are coded."""
        return bytes_per_token(
            len(self.layer_ids), self.hidden_size, last=self.last, dtype=self.dtype
        )

    def bytes_bound(self, *, tokens: int, samples: int) -> int:
        """The most bytes that a shard of so many tokens and samples takes."""
        return unit_bytes_bound(
            tokens=tokens,
            samples=samples,
            num_taps=len(self.layer_ids),
            hidden_size=self.hidden_size,
            last=self.last,
            dtype=self.dtype,
            codec=self.codec,
        )

    def units(self, rows: Rows, batch_tokens: int) -> tuple[Unit, ...]:
        """The plan of these samples."""
        return plan_units(
            rows.lengths,
            bytes_per_token=self.bytes_per_token,
            shard_bytes=self.shard_bytes,
            batch_tokens=batch_tokens,
        )

    def manifest(
        self,
        rows: Rows,
        units: tuple[Unit, ...],
        stats: Mapping[int, Stat],
        *,
        fingerprint: str,
        store: str = "",
        quarantined: Mapping[str, str] | None = None,
    ) -> Manifest:
        """What is published: `stats` are the verified units by index, `quarantined` says by key
        why others are missing. Raises ValueError where a unit is in neither.
        """  # noqa: D205
        reasons = quarantined or {}
        entries, aside = [], []
        for unit in units:
            ids = rows.sample_ids.take(unit.samples)
            stat = stats.get(unit.index)
            if stat is None:
                if unit.key not in reasons:
                    raise ValueError(f"{unit.key} is neither verified nor quarantined")
                aside.append(
                    QuarantinedUnit(key=unit.key, reason=reasons[unit.key], sample_ids=ids)
                )
                continue
            order = list(unit.samples)
            entries.append(
                UnitEntry(
                    key=unit.key,
                    size=stat.size,
                    crc64=crc64_hex(stat.crc64),
                    sample_ids=ids,
                    lengths=tuple(rows.lengths[order].tolist()),
                    loss_tokens=tuple(rows.loss_tokens[order].tolist()),
                )
            )
        return Manifest(
            fingerprint=fingerprint,
            target_identity=self.target_identity,
            hidden_size=self.hidden_size,
            layer_ids=self.layer_ids,
            layer_convention=LayerConvention.OUTPUT_AFTER_LAYER,
            last=self.last,
            dtype=self.dtype,
            units=tuple(entries),
            codec=self.codec,
            store=store,
            quarantined=tuple(aside),
        )


def read_layout(fields: Fields, hidden_size: int) -> Layout:
    """The layout that a stage record's fields mean. Raises IntegrityError where they are not those
    of an extraction.
    """  # noqa: D205
    try:
        return Layout(
            target_identity=fields["target.identity"],
            hidden_size=hidden_size,
            layer_ids=tuple(_listed(fields, "extract.layer_ids")),
            last=fields["extract.last"],
            dtype=fields["extract.dtype"],
            codec=fields.get("extract.codec", "none"),
            shard_bytes=fields["extract.shard_bytes"],
        )
    except KeyError as error:
        raise IntegrityError(
            f"the record of the extraction has no {error}: it was written by another version of "
            "Paceline. Use that one."
        ) from error


def _listed(fields: Fields, name: str) -> list[Any]:
    found: list[Any] = []
    while f"{name}.{len(found)}" in fields:
        found.append(fields[f"{name}.{len(found)}"])
    if not found:
        raise KeyError(name)
    return found
