"""Sources, recipes and run directories for the corpus tests."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from fixtures_chatml import save_tokenizer
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import (
    CorpusRecipe,
    Recipe,
    RegenerateRecipe,
    SourceRecipe,
    TargetRecipe,
)
from paceline.types import Sample
from paceline.types.sample import read_samples


def write_jsonl(path: Path, rows: Sequence[Any]) -> Path:
    """One JSON line per row; a row of bytes stands as it is."""
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def recipe_of(
    folder: Path,
    *sources: Path | SourceRecipe,
    tokenizer: Any | None = None,
    regenerate: bool = False,
    **corpus: Any,
) -> Recipe:
    """A recipe whose target folder holds a tokenizer alone; nothing falls into validation."""
    target = folder / "target"
    if not target.exists():
        save_tokenizer(target, tokenizer)
    given = tuple(s if isinstance(s, SourceRecipe) else SourceRecipe(path=str(s)) for s in sources)
    corpus = {"validation_fraction": 0.0, **corpus}
    return Recipe(
        target=TargetRecipe(path=str(target)),
        corpus=CorpusRecipe(sources=given, **corpus),
        regenerate=RegenerateRecipe(enabled=regenerate),
    )


def samples_of(run_dir: RunDir) -> list[Sample]:
    return list(read_samples(run_dir.prepared))


def quarantine_of(run_dir: RunDir) -> list[dict[str, Any]]:
    lines = (run_dir.corpus / "quarantine.jsonl").read_bytes().splitlines()
    return [msgspec.json.decode(line) for line in lines]


def reasons_of(run_dir: RunDir) -> list[str]:
    return [row["reason"] for row in quarantine_of(run_dir)]
