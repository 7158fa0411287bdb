"""Units planned over a made corpus, and workers opened on them, for tests of the capturing side."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from extract_runs import make_sample
from paceline.durable.iowatch import IoWatch
from paceline.extract.job import Job, UnitWork
from paceline.features.plan import Unit, plan_units
from paceline.flow.units import Task, WorkerContext
from paceline.recipe.schema import TargetRecipe
from paceline.target.spec import read_spec
from paceline.types import Sample
from paceline.types.rows import Rows, index_rows
from paceline.types.sample import encode_sample

FINGERPRINT = "f" * 32


@dataclass
class Units:
    """A corpus, its plan, and the job that all its units have in common."""

    samples: list[Sample]
    rows: Rows
    units: tuple[Unit, ...]
    job: Job
    states: list[str] = field(default_factory=list)
    """What the last context was told."""

    def context(self) -> WorkerContext:
        """A context that notes states."""
        self.states = []
        return WorkerContext(0, IoWatch(), self.states.append)

    def task(self, index: int) -> Task:
        """The task of a unit."""
        unit = self.units[index]
        return Task(
            index=index,
            key=unit.key,
            num_bytes=1 << 20,
            tokens=sum(int(self.rows.lengths[s]) for s in unit.samples),
            payload=UnitWork(
                positions=tuple(int(self.rows.positions[s]) for s in unit.samples),
                batches=tuple(map(len, unit.batches)),
            ),
        )

    def with_job(self, **changes: Any) -> "Units":
        """The same with another job."""
        return replace(self, job=replace(self.job, **changes))


def make_units(
    folder: Path,
    target: Path,
    lengths: Sequence[int],
    *,
    batch_tokens: int = 64,
    unit_tokens: int = 1 << 30,
    samples: Sequence[Sample] | None = None,
    **fields: Any,
) -> Units:
    """Write a corpus of samples of these lengths and plan it; `fields` are those of the job."""
    made = list(samples or (make_sample(n, length) for n, length in enumerate(lengths)))
    corpus = folder / "corpus.jsonl"
    corpus.write_bytes(b"".join(map(encode_sample, made)))
    spec = read_spec(target)
    rows = index_rows(corpus, vocab_size=spec.vocab_size, max_position=spec.max_position)
    values = {
        "target": TargetRecipe(path=str(target)),
        "identity": spec.identity,
        "corpus": corpus,
        "layer_ids": (1, 3),
        "last": True,
        "dtype": "bfloat16",
        "codec": "none",
        "fingerprint": FINGERPRINT,
        "check_positions": tuple(int(p) for p in rows.positions[:1]),
    }
    return Units(
        samples=made,
        rows=rows,
        units=plan_units(
            rows.lengths, bytes_per_token=1, shard_bytes=unit_tokens, batch_tokens=batch_tokens
        ),
        job=Job(**(values | fields)),
    )
