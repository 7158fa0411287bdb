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
    pieces = _pieces(_batches(path))
    number = 0
    while True:
        try:
            rows = next(pieces, None)
        except DataError:
            raise
        except Exception as error:  # noqa: BLE001  a damaged file makes that library raise anything
            detail = f"cannot be read from here on ({_first_line(error)})"
            yield torn_row(path, number + 1, b"", detail)
            return
        if rows is None:
            return
        for row in rows:
            number += 1
            value = _without_nothing(row)
            yield RawRow(path, number, msgspec.json.encode(value, enc_hook=str), value)


def count_rows(path: Path) -> int:
    """Rows of a `.parquet` or `.arrow` file, without looking at any.

    Raises DataError for a file that cannot be read as what it is called.
    """
    try:
        if path.suffix.lower() == ".parquet":
            from pyarrow import parquet

            return parquet.read_metadata(path).num_rows
        return sum(batch.num_rows for batch in _batches(path))
    except DataError:
        raise
    except Exception as error:
        raise _unreadable(path, error) from error


def _pieces(batches: Iterator[Any]) -> Iterator[list[dict[str, Any]]]:
    for batch in batches:
        # Offsets of a damaged file lead anywhere, and nothing else looks at them.
        batch.validate(full=True)
        for start in range(0, batch.num_rows, _ROWS):
            yield batch.slice(start, _ROWS).to_pylist()


def _batches(path: Path) -> Iterator[Any]:
    import pyarrow as pa
    from pyarrow import ipc, parquet

    if path.suffix.lower() == ".parquet":
        try:
            file = parquet.ParquetFile(path, memory_map=True, pre_buffer=False)
        except Exception as error:
            raise _unreadable(path, error) from error
        with file:
            yield from file.iter_batches(batch_size=_ROWS, use_threads=False)
        return
    try:
        source = pa.memory_map(str(path))
    except Exception as error:
        raise _unreadable(path, error) from error
    with source:
        try:
            stream = ipc.open_stream(source)
        except Exception:  # noqa: BLE001  then it is a file, or nothing
            stream = None
        if stream is not None:
            yield from stream
            return
        try:
            source.seek(0)
            table = ipc.open_file(source)
        except Exception as error:
            raise _unreadable(path, error) from error
        for number in range(table.num_record_batches):
            yield table.get_batch(number)


def _unreadable(path: Path, error: Exception) -> DataError:
    form = path.suffix.lower().removeprefix(".").capitalize()
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
