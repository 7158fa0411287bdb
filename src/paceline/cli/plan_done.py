"""What a run's own records say is extracted already, for `paceline plan`."""

from dataclasses import replace

import numpy as np

from paceline.doctor.plan_bytes import Done
from paceline.durable.journal import salvage
from paceline.durable.open_store import local_path
from paceline.extract.layout import JOURNAL, Layout, read_layout
from paceline.extract.ledger import recorded
from paceline.extract.setting import kept_split
from paceline.features.plan import Lengths, unit_bounds, unit_key
from paceline.recipe.extract_inputs import is_object_store, resolved_codec
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import Recipe
from paceline.recipe.stage import Record, read_record
from paceline.target.spec import TargetSpec
from paceline.target.taps import taps_of


def done_of(
    recipe: Recipe, run_dir: RunDir, spec: TargetSpec, corpus_digest: str, lengths: Lengths
) -> Done:
    """What is verified of an extraction by `recipe`, as the run's record and journal tell.

    Nothing where what stands there is another recipe's. No object store is asked; of a folder its
    names are read. Raises IntegrityError for a damaged record, RecipeError for impossible taps.
    """
    record = read_record(run_dir.features, "extract")
    if record is None or record.outputs == {}:
        return Done()
    layout = read_layout(record.fields, spec.hidden_size)
    if not _is_asked(recipe, spec, corpus_digest, record, layout):
        return Done()
    if record.outputs is not None:
        # Other machines may have made shards of it, which the journal does not know.
        told = record.report
        shards = told["units"] - told["units_missing"]
        return Done(
            shards=shards, samples=told["samples"], tokens=told["tokens"], bytes=told["bytes"]
        )
    journal = run_dir.features / JOURNAL
    data = journal.read_bytes() if journal.is_file() else b""
    verified = recorded(salvage(data), record.fingerprint).verified
    there = _names(recipe, run_dir, record.fingerprint)
    bounds = unit_bounds(
        lengths, bytes_per_token=layout.bytes_per_token, shard_bytes=layout.shard_bytes
    )
    before = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))[bounds].tolist()
    done = [
        index
        for index in range(len(bounds) - 1)
        if unit_key(index) in verified and (there is None or unit_key(index) in there)
    ]
    return Done(
        shards=len(done),
        samples=sum(bounds[index + 1] - bounds[index] for index in done),
        tokens=sum(before[index + 1] - before[index] for index in done),
        bytes=sum(verified[unit_key(index)].size for index in done),
    )


def _is_asked(
    recipe: Recipe, spec: TargetSpec, corpus_digest: str, record: Record, layout: Layout
) -> bool:
    """Whether a record is of this very extraction; the target's weights are not read for it."""
    asked = replace(
        layout,
        layer_ids=taps_of(recipe.extract, spec.num_layers),
        last=recipe.extract.last,
        dtype=recipe.extract.dtype,
        codec=resolved_codec(recipe.extract),
        shard_bytes=recipe.extract.shard_bytes,
    )
    return asked == layout and (
        record.fields.get("corpus"),
        record.fields.get("target.dtype"),
        record.fields.get("extract.samples"),
    ) == (corpus_digest, recipe.target.dtype, kept_split(recipe))


def _names(recipe: Recipe, run_dir: RunDir, fingerprint: str) -> set[str] | None:
    """What lies in the folder of the features; None where they are uploaded."""
    store = recipe.extract.store
    if is_object_store(store):
        return None
    folder = local_path(store) / fingerprint if store else run_dir.features
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()
