"""Rows of Parquet and Arrow files, some hundred at a time."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from paceline.corpus.raw_row import RawRow, torn_row
from paceline.durable.errors import DataError

_ROWS = 128
"""Rows that are turned into objects together."""


def columnar_rows(path: Path) -> Iterator[RawRow]:
    """The rows of a `.parquet` or `.arrow` file; `datasets` saves the latter as a stream.

    Columns without a value are left out of a row, at any depth: a table has every column in every
    row. A file that breaks off gives the rows before, and one that stands for the rest.

    Raises DataError for a file that cannot be opened as what it is called.
    """
    batches = _parquet(path) if path.suffix.lower() == ".parquet" else _arrow(path)
    number = 0
    for batch in batches:
        if isinstance(batch, str):
            yield torn_row(path, number + 1, b"", batch)
            return
        for start in range(0, batch.num_rows, _ROWS):
            for row in batch.slice(start, _ROWS).to_pylist():
                number += 1
                value = _without_nothing(row)
                yield RawRow(path, number, msgspec.json.encode(value, enc_hook=str), value)


def count_rows(path: Path) -> int:
    """Rows of a `.parquet` or `.arrow` file, without looking at any.

    Raises DataError for a file that cannot be opened as what it is called.
    """
    if path.suffix.lower() == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as parquet

        try:
            return parquet.read_metadata(path).num_rows
        except (pa.ArrowException, OSError) as error:
            raise _unreadable(path, "Parquet", error) from error
    return sum(batch.num_rows for batch in _arrow(path) if not isinstance(batch, str))


def _parquet(path: Path) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    try:
        file = parquet.ParquetFile(path, memory_map=True, pre_buffer=False)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, "Parquet", error) from error
    with file:
        try:
            for batch in file.iter_batches(batch_size=_ROWS, use_threads=False):
                batch.validate(full=True)
                yield batch
        except (pa.ArrowException, OSError) as error:
            yield f"cannot be read from here on ({_first_line(error)})"


def _arrow(path: Path) -> Iterator[Any]:
    import pyarrow as pa
    from pyarrow import ipc

    try:
        source = pa.memory_map(str(path))
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, "Arrow", error) from error
    with source:
        try:
            reader = ipc.open_stream(source)
        except (pa.ArrowException, OSError):
            yield from _arrow_file(path, source)
            return
        while True:
            try:
                batch = reader.read_next_batch()
                # Offsets of a damaged file lead anywhere, and nothing else looks at them.
                batch.validate(full=True)
            except StopIteration:
                return
            except (pa.ArrowException, OSError) as error:
                yield f"cannot be read from here on ({_first_line(error)})"
                return
            yield batch


def _arrow_file(path: Path, source: Any) -> Iterator[Any]:
    import pyarrow as pa
    from pyarrow import ipc

    try:
        source.seek(0)
        reader = ipc.open_file(source)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, "Arrow", error) from error
    for number in range(reader.num_record_batches):
        try:
            batch = reader.get_batch(number)
            batch.validate(full=True)
        except (pa.ArrowException, OSError) as error:
            yield f"cannot be read from here on ({_first_line(error)})"
            return
        yield batch


def _unreadable(path: Path, form: str, error: Exception) -> DataError:
    return DataError(
        f"{path}: not a whole {form} file ({_first_line(error)}). Fetch or write it again, or take "
        "it out of corpus.sources."
    )


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _without_nothing(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_nothing(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [_without_nothing(item) for item in value]
    return value
