"""Rows of Parquet and Arrow files, some hundred at a time."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from paceline.durable.errors import DataError
from paceline.rows.raw_row import RawRow, torn_row

_ROWS = 128
"""Rows that are turned into objects together."""


def columnar_rows(path: Path) -> Iterator[RawRow]:
    """The rows of a `.parquet` or `.arrow` file; `datasets` saves the latter as a stream.

    Columns without a value are left out of a row, at any depth: a table has every column in every
    row. Bytes that are UTF-8 are text, which older writers do not mark as such; of others a row
    has their number. A file that breaks off gives the rows before, and one that stands for the
    rest.

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
            value = _plain(row)
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
            yield _objects(batch.slice(start, _ROWS))


def _objects(batch: Any) -> list[dict[str, Any]]:
    """The rows of a batch."""
    try:
        return batch.to_pylist(maps_as_pydicts="lossy")
    except (ValueError, ArithmeticError):
        # A time may be one that Python has no word for, and is seldom what anybody asks about.
        import pyarrow as pa

        columns = [column.cast(_without_times(column.type)) for column in batch.columns]
        plain = pa.RecordBatch.from_arrays(columns, names=batch.schema.names)
        return plain.to_pylist(maps_as_pydicts="lossy")


def _without_times(kind: Any) -> Any:
    """A column's type with whole numbers in place of times."""
    import pyarrow as pa

    if pa.types.is_temporal(kind) and not pa.types.is_interval(kind):
        return pa.int32() if kind.bit_width == 32 else pa.int64()
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_without_times(field.type)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(_without_times(kind.key_type), _without_times(kind.item_type))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(kind.value_field.with_type(_without_times(kind.value_type)), kind.list_size)
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_without_times(kind.value_type)))
    if pa.types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(_without_times(kind.value_type)))
    return kind


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


def _plain(value: Any) -> Any:
    """A row's value as JSON has it."""
    if isinstance(value, dict):
        return {_key(k): _plain(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return {"bytes": len(value)}
    return value


def _key(key: Any) -> str:
    return key if isinstance(key, str) else str(_plain(key))
