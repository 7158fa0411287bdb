"""A tiny target, a corpus and a recipe, for tests of the extraction."""

import random
from collections.abc import Sequence
from pathlib import Path

from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import ExtractRecipe, Recipe, RegenerateRecipe, TargetRecipe
from paceline.types import Sample, Split
from paceline.types.sample import encode_sample

ROOMY = {"high_mark": 1.0, "low_mark": 0.99}
"""Of `extract`, where files are staged on whatever disk the tests have: it may be nearly full."""


def make_sample(
    number: int, length: int, *, split: Split = Split.TRAIN, loss: int | None = None, seed: int = 0
) -> Sample:
    """A sample of `length` random tokens, the last `loss` (half where None) of them trained."""
    rng = random.Random(f"{seed}/{number}")
    trained = max(1, length // 2) if loss is None else loss
    return Sample(
        sample_id=f"{number:032x}",
        prompt_id=f"{number:032x}",
        source="made",
        split=split,
        messages=[],
        input_ids=[rng.randrange(256) for _ in range(length)],
        loss_spans=[(length - trained, length)] if trained else [],
    )


def make_samples(count: int, *, seed: int = 0, longest: int = 40) -> list[Sample]:
    """Samples of 4 to `longest` tokens, every fifth of them for validation."""
    rng = random.Random(seed)
    return [
        make_sample(
            n,
            rng.randint(4, longest),
            split=Split.VALIDATION if n % 5 == 4 else Split.TRAIN,
            seed=seed,
        )
        for n in range(count)
    ]


def make_run(
    root: Path,
    target: Path,
    samples: Sequence[Sample],
    *,
    shard_bytes: int = 8192,
    batch_tokens: int = 64,
    workers: int = 1,
    last: bool = True,
    dtype: str = "bfloat16",
    taps: tuple[int, ...] | None = (1, 3),
    isolate: bool | None = None,
    **extract: object,
) -> tuple[Recipe, RunDir]:
    """Write the corpus into a run directory; return what `extract.stage.run` takes.

    `isolate` is whether there are several workers, where it is not given: a process takes seconds
    to begin.
    """
    run_dir = RunDir(root)
    run_dir.corpus.mkdir(parents=True, exist_ok=True)
    run_dir.prepared.write_bytes(b"".join(map(encode_sample, samples)))
    recipe = Recipe(
        target=TargetRecipe(path=str(target), workers=workers),
        regenerate=RegenerateRecipe(enabled=False),
        extract=ExtractRecipe(
            taps=taps,
            last=last,
            dtype=dtype,  # type: ignore[arg-type]
            shard_bytes=shard_bytes,
            batch_tokens=batch_tokens,
            isolate=workers > 1 if isolate is None else isolate,
            **extract,  # type: ignore[arg-type]
        ),
    )
    return recipe, run_dir


def contents(folder: Path) -> dict[str, bytes]:
    """Shards and manifest of a store."""
    return {
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        if path.suffix == ".safetensors" or path.name == "manifest.json"
    }
