"""What a process does that tokenises: rows as bytes in, samples as lines of the corpus out."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from paceline.corpus.mask import renderer_of
from paceline.corpus.rows import Accepted, Rejected, RowPreparer
from paceline.recipe.schema import Recipe
from paceline.rows.overlap import grams_of
from paceline.types import Sample, Split
from paceline.types.sample import encode_sample


@dataclass(frozen=True)
class Job:
    """All that such a process is told."""

    recipe: Recipe
    grams: bool
    """Whether anybody asks for the prompts' 8-grams."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some rows of one source, in order."""

    source: str
    heldout: bool
    first_line: int
    rows: tuple[bytes, ...]
    """Each a JSON object."""

    @property
    def name(self) -> str:
        """For errors."""
        return f"{len(self.rows)} rows of {self.source} from line {self.first_line}"


@dataclass(frozen=True, slots=True)
class Line:
    """One sample as a line of the corpus, with what the counts need of it."""

    data: bytes
    """The line, its line feed included."""
    sample_id: bytes
    prompt_id: bytes
    """Sixteen bytes each."""
    split: Split
    tokens: int
    loss_tokens: int
    trained: bytes
    """The ids that are trained on, four bytes each, in the machine's order."""


@dataclass(frozen=True, slots=True)
class Ready:
    """An accepted row."""

    lines: tuple[Line, ...]
    notes: Counter[str]
    grams: tuple[bytes, ...]


def tokenise(job: Job) -> Callable[[Chunk], list[Ready | Rejected]]:
    """Set a process up: load the tokenizer, return what prepares a chunk, a result for each row."""
    recipe = job.recipe
    preparer = RowPreparer(renderer_of(recipe), recipe.corpus, recipe.regenerate.enabled)
    decoder = msgspec.json.Decoder(dict[str, Any])

    def prepare(chunk: Chunk) -> list[Ready | Rejected]:
        results: list[Ready | Rejected] = []
        for raw in chunk.rows:
            row = decoder.decode(raw)
            outcome = preparer.prepare(row, chunk.source, heldout=chunk.heldout)
            results.append(_ready(outcome, job) if isinstance(outcome, Accepted) else outcome)
        return results

    return prepare


def _ready(accepted: Accepted, job: Job) -> Ready:
    return Ready(
        lines=tuple(_line(sample) for sample in accepted.samples),
        notes=accepted.notes,
        grams=grams_of(accepted.sample.messages) if job.grams else (),
    )


def _line(sample: Sample) -> Line:
    trained = [np.asarray(sample.input_ids[a:b], dtype=np.uint32) for a, b in sample.loss_spans]
    return Line(
        data=encode_sample(sample),
        sample_id=bytes.fromhex(sample.sample_id),
        prompt_id=bytes.fromhex(sample.prompt_id),
        split=sample.split,
        tokens=len(sample.input_ids),
        loss_tokens=sample.num_loss_tokens,
        trained=b"".join(part.tobytes() for part in trained),
    )
