"""A run directory whose features are made without a target: its papers are the real ones."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.durable.journal import Journal
from paceline.durable.store import Stat
from paceline.extract.layout import JOURNAL, read_layout
from paceline.features import manifest as manifests
from paceline.recipe.fingerprint import Fields, digest_file, flatten
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import (
    CorpusRecipe,
    ExtractRecipe,
    Recipe,
    RegenerateRecipe,
    SourceRecipe,
    TargetRecipe,
)
from paceline.recipe.stage import StageRecord
from paceline.recipe.write import write_recipe
from paceline.types.sample import Sample, encode_sample
from unit_stores import HIDDEN, LAYERS, SHARD_BYTES, UnitWorld, plan_world


@dataclass(frozen=True)
class FeatureRun:
    """A run with its corpus, a begun extraction, and the world of its shards."""

    run_dir: RunDir
    record: StageRecord
    fields: Fields
    world: UnitWorld

    @property
    def journal(self) -> Path:
        """The journal's file."""
        return self.run_dir.features / JOURNAL

    @property
    def manifest(self) -> Path:
        """The manifest's file."""
        return self.run_dir.features / manifests.FILE_NAME

    def write(self, indices: Sequence[int] | None = None) -> dict[int, Stat]:
        """Write the shards of these units, all where None, and record them."""
        chosen = range(len(self.world.units)) if indices is None else indices
        stats = {index: self.world.write(index) for index in chosen}
        with Journal(self.journal) as journal:
            for record in self.world.verified(stats):
                journal.append(record)
        return stats

    def finish(self) -> dict[int, Stat]:
        """Write everything, publish the manifest, and finish the record, as the stage does."""
        stats = self.write()
        manifest = read_layout(self.fields, HIDDEN).manifest(
            self.world.rows, self.world.units, stats, fingerprint=self.record.fingerprint
        )
        path = manifests.publish(self.run_dir.features, manifest)
        self.record.finish([path], {"samples": len(self.world.rows)})
        return stats


def make_feature_run(root: Path, samples: Sequence[Sample], *, store: str = "") -> FeatureRun:
    """A run whose extraction has begun, and made nothing yet."""
    run_dir = RunDir(root)
    run_dir.corpus.mkdir(parents=True)
    run_dir.prepared.write_bytes(b"".join(map(encode_sample, samples)))
    target = root.with_name(f"{root.name}-target")
    target.mkdir()
    config = {"model_type": "llama", "hidden_size": HIDDEN, "num_hidden_layers": 5}
    (target / "config.json").write_text(json.dumps(config))
    recipe = Recipe(
        target=TargetRecipe(path=str(target)),
        corpus=CorpusRecipe(sources=(SourceRecipe(path=str(root / "rows.jsonl")),)),
        regenerate=RegenerateRecipe(enabled=False),
        extract=ExtractRecipe(taps=LAYERS, shard_bytes=SHARD_BYTES, store=store),
    )
    write_recipe(recipe, run_dir.recipe)
    fields = flatten(
        {
            "format": 1,
            "corpus": digest_file(run_dir.prepared),
            "target": {"identity": "t", "dtype": "float32"},
            "extract": {
                "layer_ids": LAYERS,
                "last": False,
                "dtype": "bfloat16",
                "shard_bytes": SHARD_BYTES,
            },
        }
    )
    record = StageRecord(run_dir.features, "extract", fields)
    with Journal(run_dir.features / JOURNAL):
        record.begin()
    folder = Path(store) / record.fingerprint if store else run_dir.features
    world = plan_world(run_dir.prepared, folder, record.fingerprint)
    return FeatureRun(run_dir, record, fields, world)
