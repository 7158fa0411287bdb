"""What tests of a whole extraction look at: events, journal, objects of the store."""

import json
import os
import random
import shutil
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.durable.journal import fold
from paceline.durable.object_store import ObjectStore
from paceline.durable.store import Store
from paceline.features.manifest import FILE_NAME
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import (
    CorpusRecipe,
    DrafterRecipe,
    ExtractRecipe,
    Recipe,
    RegenerateRecipe,
    SourceRecipe,
    TargetRecipe,
    TrainRecipe,
)
from paceline.recipe.write import write_recipe
from run_server import RunServer


def events_of(run_dir: RunDir, kind: str) -> list[dict[str, Any]]:
    """The events of one kind, oldest first; without lines that a kill has torn."""
    path = run_dir.events / "extract.jsonl"
    lines = path.read_bytes().splitlines() if path.exists() else []
    told = [json.loads(line) for line in lines if line.endswith(b"}")]
    return [event for event in told if event["kind"] == kind]


def journal_of(run_dir: RunDir) -> list[dict[str, Any]]:
    """The journal's records; none before there is one."""
    path = run_dir.features / "journal.jsonl"
    if not path.exists():
        return []
    return list(fold(path.read_bytes(), path).records)


def times_recorded(run_dir: RunDir, kind: str) -> Counter[str]:
    """How often the journal has each unit as `staged` or `verified`."""
    return Counter(r["key"] for r in journal_of(run_dir) if r["kind"] == kind)


def with_extract(recipe: Recipe, **changes: Any) -> Recipe:
    """The recipe with other values in its `extract`."""
    return replace(recipe, extract=replace(recipe.extract, **changes))


@dataclass(frozen=True)
class Prepared:
    """A run whose corpus is there, made by the command line."""

    recipe: Recipe
    root: Path

    def copy(self, root: Path, **extract: Any) -> tuple[RunDir, tuple[str, ...]]:
        """The same run elsewhere, and the command line of its extraction.

        `extract` are other values of the recipe's part.
        """
        shutil.copytree(self.root, root)
        path = root.with_name(f"{root.name}.yaml")
        write_recipe(with_extract(self.recipe, **extract), path)
        return RunDir(root), ("extract", str(path), "--run", str(root))


def prepare_run(server: RunServer, target: Path, root: Path, *, samples: int) -> Prepared:
    """Prepare `samples` conversations, with their answers, for `target`."""
    root.mkdir()
    rng = random.Random(0)
    rows = [
        [{"role": role, "content": _words(rng, number)} for role in ("user", "assistant")]
        for number in range(samples)
    ]
    source = root / "rows.jsonl"
    source.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    recipe = Recipe(
        name="trial",
        target=TargetRecipe(path=str(target)),
        corpus=CorpusRecipe(sources=(SourceRecipe(path=str(source)),), max_length=256),
        regenerate=RegenerateRecipe(enabled=False),
        extract=ExtractRecipe(
            taps=(1, 3),
            shard_bytes=16384,
            batch_tokens=256,
            isolate=False,
        ),
        drafter=DrafterRecipe(layers=1, block_size=4),
        train=TrainRecipe(anchors=4, batch_samples=4, evaluations=1, epochs=0.25),
    )
    path = root / "trial.yaml"
    write_recipe(recipe, path)
    run = root / "run"
    assert server.run("prepare", str(path), "--run", str(run)) == 0, server.log.read_text()
    return Prepared(recipe, run)


def _words(rng: random.Random, number: int) -> str:
    return f"{number} " + "".join(rng.choices("abcdefgh ", k=rng.randint(4, 60)))


def objects(store: Store, prefix: str = "unit-") -> dict[str, bytes]:
    """Objects and their bytes."""
    return {o.key: store.get_range(o.key, 0, o.size) for o in store.list(prefix)}


def bucket_of(recipe: Recipe, run_dir: RunDir) -> ObjectStore:
    """The object store of a run's extraction, as its record names it."""
    record = json.loads((run_dir.features / "extract.stage.json").read_bytes())
    url = f"{recipe.extract.store}/{record['fingerprint']}"
    return ObjectStore(url, recipe.extract.store_options)


def manifest_bytes(run_dir: RunDir) -> bytes:
    """Of the run's own manifest."""
    return (run_dir.features / FILE_NAME).read_bytes()


def bytes_below(folder: Path) -> int:
    """Bytes of all files below a folder, as they are now; files come and go meanwhile."""
    total = 0
    for top, _, names in os.walk(folder):
        for name in names:
            if ".safetensors" in name:
                with suppress(FileNotFoundError):
                    total += Path(top, name).stat().st_size
    return total
