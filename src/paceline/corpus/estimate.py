"""How many samples a recipe's data will give, and how long: some rows stand for all."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from paceline.corpus.mask import renderer_of
from paceline.corpus.mixture import expected_sizes
from paceline.corpus.rows import Accepted, RowPreparer
from paceline.durable.errors import DataError
from paceline.recipe.data_files import data_files
from paceline.recipe.schema import Recipe, SourceRecipe
from paceline.rows.columnar import columnar_rows, count_rows
from paceline.rows.formats import read_rows
from paceline.rows.raw_row import MAX_ROW_BYTES
from paceline.target.chat import check_template_args

_READ_WHOLE = 64 << 20
"""Bytes up to which a file's lines are counted; of a larger one they are estimated."""

_LINES_A_ROW = 8
"""Lines whose length is looked at for each that goes through the tokenizer."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The samples that the training sources give, by those rows that were looked at."""

    rows: int
    """Of the files; an estimate where `rows_counted` is false."""
    rows_counted: bool
    looked_at: int
    """Rows that went through the tokenizer."""
    samples: int
    """Rows that would be accepted; rows that come twice are not known of."""
    tokens: int
    """Of all of them."""
    error: float
    """Share of `tokens` by which the choice of rows may move it: two standard errors."""
    answers_at_most: bool
    """Whether answers, not written yet, were counted at `regenerate.max_new_tokens`."""


@dataclass(frozen=True)
class _Source:
    rows: int
    rows_error: float
    """Standard error of `rows` as a share of it; 0 where they were counted."""
    picked: tuple[dict[str, Any] | None, ...]
    """Rows from all over the file; None for one that is no object."""


def estimate_samples(recipe: Recipe, *, look_at: int = 400) -> Estimate:
    """Put `look_at` rows of each training source through the target's tokenizer.

    Loads no model. Raises DataError for a source that is missing, empty or of unknown form, and
    where no row that was looked at is accepted; TargetError for a target without tokenizer or
    template.
    """
    sources = [s for s in recipe.corpus.sources if s.split == "train"]
    for source in sources:
        data_files(source.path)
    check_template_args(recipe.corpus.template_args)
    preparer = RowPreparer(renderer_of(recipe), recipe.corpus, recipe.regenerate.enabled)
    rows = looked_at = 0
    is_counted = True
    found: list[_Found] = []
    for source in sources:
        look = _look(source, look_at)
        rows += look.rows
        looked_at += len(look.picked)
        is_counted &= look.rows_error == 0
        found.append(_weigh(look, [_lengths(preparer, row, recipe) for row in look.picked]))
    sizes = [one.samples for one in found]
    taken = [
        kept / size if size else 0.0
        for kept, size in zip(expected_sizes(sizes, sources), sizes, strict=True)
    ]
    samples = sum(one.samples * share for one, share in zip(found, taken, strict=True))
    tokens = sum(one.tokens * share for one, share in zip(found, taken, strict=True))
    variance = sum(one.variance * share**2 for one, share in zip(found, taken, strict=True))
    if not tokens:
        raise DataError(
            f"none of the {looked_at} rows of {', '.join(s.path for s in sources)} that were "
            "looked at would be accepted. `paceline prepare` lists each with its reason."
        )
    return Estimate(
        rows=rows,
        rows_counted=is_counted,
        looked_at=looked_at,
        samples=max(1, round(samples)),
        tokens=round(tokens),
        error=2 * variance**0.5 / tokens,
        answers_at_most=recipe.regenerate.enabled,
    )


@dataclass(frozen=True)
class _Found:
    """What a source would give, taken whole."""

    samples: float
    tokens: float
    variance: float
    """Of `tokens`."""


def _weigh(look: _Source, given: list[list[int]]) -> _Found:
    """`given` are the lengths of each looked-at row's samples."""
    if not given:
        return _Found(0.0, 0.0, 0.0)
    # A rejected row has no tokens: its share and the lengths make up one mean.
    lengths = [sum(row) for row in given]
    share = look.rows / len(lengths)
    tokens = share * sum(lengths)
    variance = (tokens * look.rows_error) ** 2
    if 1 < len(lengths) < look.rows:
        variance += look.rows**2 * statistics.variance(lengths) / len(lengths)
    return _Found(share * sum(map(len, given)), tokens, variance)


def _lengths(preparer: RowPreparer, row: dict[str, Any] | None, recipe: Recipe) -> list[int]:
    """Tokens of each of a row's samples; none where it is rejected."""
    outcome = None if row is None else preparer.prepare(row, "", heldout=False)
    if not isinstance(outcome, Accepted):
        return []
    lengths = [len(sample.input_ids) for sample in outcome.samples]
    if recipe.regenerate.enabled:
        answer = recipe.regenerate.max_new_tokens
        return [min(length + answer, recipe.corpus.max_length) for length in lengths]
    return lengths


def _look(source: SourceRecipe, count: int) -> _Source:
    files = data_files(source.path)
    sizes = [file.stat().st_size for file in files]
    suffixes = {file.suffix.lower() for file in files}
    if sum(sizes) > _READ_WHOLE and suffixes <= {".jsonl", ".ndjson"}:
        found = _from_all_over(list(zip(files, sizes, strict=True)), count)
    elif sum(sizes) > _READ_WHOLE and suffixes <= {".parquet", ".arrow"}:
        each = -(-count // len(files))
        rows = [row.value for file in files for row in islice(columnar_rows(file), each)]
        found = _Source(sum(map(count_rows, files)), 0.0, tuple(rows))
    else:
        number = sum(not row.is_blank for row in read_rows(source.path, source.limit))
        step = max(1, -(-number // count))
        solid = (row for row in read_rows(source.path, source.limit) if not row.is_blank)
        picked = tuple(row.value for place, row in enumerate(solid) if place % step == 0)
        found = _Source(number, 0.0, picked)
    if source.limit is not None and source.limit < found.rows:
        return _Source(source.limit, 0.0, found.picked)
    return found


def _from_all_over(files: Sequence[tuple[Path, int]], count: int) -> _Source:
    """Rows of files of lines, whose number is estimated from the length of some."""
    # A line's length costs next to nothing, so more of them tell how many there are.
    size = sum(bytes_ for _, bytes_ in files)
    wanted = count * _LINES_A_ROW
    lines = [
        line
        for file, bytes_ in files
        for line in _lines_of(file, bytes_, -(-wanted * bytes_ // size))
    ]
    lengths = [len(line) for line in lines]
    mean = statistics.fmean(lengths)
    number = max(len(lines), round(size / mean))
    error = max(1e-9, statistics.pstdev(lengths) / mean / len(lengths) ** 0.5)
    return _Source(number, error, tuple(map(_object, lines[:: -(-len(lines) // count)])))


def _lines_of(path: Path, size: int, count: int) -> Iterator[bytes]:
    """The lines that begin behind `count` places at equal distances."""
    with path.open("rb") as file:
        for number in range(count):
            file.seek(size * number // count)
            if number:
                file.readline(MAX_ROW_BYTES)
            line = file.readline(MAX_ROW_BYTES)
            if line.strip():
                yield line


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
