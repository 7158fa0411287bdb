"""Rows out of whatever files people have, in a stream; a bad row never ends a file."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from paceline.recipe.data_files import PACKED_SUFFIXES, TEXT_SUFFIXES, data_files
from paceline.rows import raw_row
from paceline.rows.columnar import columnar_rows
from paceline.rows.conversation import has_conversation
from paceline.rows.json_values import values
from paceline.rows.raw_row import RawRow, bad_row, decode_row, too_long, torn_row
from paceline.rows.unpacked import Opened, opened

_BOM = b"\xef\xbb\xbf"
_HEAD = 4096
_GOES_ON = (b"{", b"[", b",", b":")
"""What a line ends in, of an object that stands on several."""


def read_rows(path: str | Path, limit: int | None = None) -> Iterator[RawRow]:
    """Stream the rows of a source's files in order, at most `limit` of them; blank ones are none.

    `path` is a file, a folder or a data set of the hub, as in a recipe. A file that breaks off
    gives its complete rows, and one that stands for what is lost. Raises DataError where there is
    no file to read, or one cannot be opened as what it is called.
    """
    taken = 0
    for file in data_files(str(path)):
        for row in _rows_of(file):
            if not row.is_blank:
                if limit is not None and taken >= limit:
                    return
                taken += 1
            yield row


def _rows_of(file: Path) -> Iterator[RawRow]:
    suffix = file.suffix.lower()
    if suffix in PACKED_SUFFIXES:
        suffix = file.with_suffix("").suffix.lower()
    if suffix in (".parquet", ".arrow"):
        yield from columnar_rows(file)
        return
    with opened(file) as data:
        if suffix in TEXT_SUFFIXES:
            yield from _lines(file, data, is_text=True)
        elif suffix == ".json":
            yield from _json(file, data)
        else:
            yield from _lines(file, data)


def _json(file: Path, data: Opened) -> Iterator[RawRow]:
    """An array; objects over several lines; or lines, which many files of that name hold."""
    head = data.stream.peek(_HEAD)[:_HEAD]  # type: ignore[attr-defined]
    start = head.removeprefix(_BOM).lstrip()
    if start.startswith(b"["):
        data.stream.read(len(head) - len(start) + 1)
        yield from _values(file, data, is_array=True)
    elif start.startswith(b"{") and start.partition(b"\n")[0].rstrip().endswith(_GOES_ON):
        data.stream.read(len(head) - len(start))
        yield from _unwrapped(file, _values(file, data, is_array=False))
    else:
        yield from _unwrapped(file, _lines(file, data))


def _values(file: Path, data: Opened, *, is_array: bool) -> Iterator[RawRow]:
    number = 0
    most = raw_row.MAX_ROW_BYTES
    for value in values(data.stream, is_array=is_array, most=most):
        number += 1
        if value.is_torn:
            yield torn_row(file, number, value.raw, data.torn or "the file ends in this row")
            return
        if value.is_too_long:
            yield too_long(file, number, value.raw)
            continue
        if not value.raw:
            yield bad_row(file, number, b"", "bad_json", "nothing between two commas")
            continue
        yield decode_row(file, number, value.raw)
    if data.torn is not None:
        yield torn_row(file, number + 1, b"", data.torn)


def _unwrapped(file: Path, rows: Iterator[RawRow]) -> Iterator[RawRow]:
    """The rows, or those that the only one of them holds."""
    first, second = next(rows, None), next(rows, None)
    inner = None
    if first is not None and first.value is not None and second is None:
        inner = _wrapped(first.value)
    if inner is None:
        yield from (row for row in (first, second) if row is not None)
        yield from rows
        return
    for place, element in enumerate(inner, start=1):
        yield decode_row(file, place, msgspec.json.encode(element))


def _wrapped(value: dict[str, Any]) -> list[Any] | None:
    """The rows inside an object that only holds them, such as `{"data": [...]}`."""
    if has_conversation(value) or "text" in value or "input_ids" in value:
        return None
    lists = [v for v in value.values() if isinstance(v, list) and v]
    found = [v for v in lists if all(isinstance(element, dict) for element in v)]
    return found[0] if len(found) == 1 else None


def _lines(file: Path, data: Opened, *, is_text: bool = False) -> Iterator[RawRow]:
    number = 0
    most = raw_row.MAX_ROW_BYTES
    while line := data.stream.readline(most + 1):
        number += 1
        if len(line) > most:
            rest = line
            while rest and not rest.endswith(b"\n"):
                rest = data.stream.readline(most)
            yield too_long(file, number, line)
            continue
        if number == 1:
            line = line.removeprefix(_BOM)
        if data.torn is not None and not line.endswith(b"\n"):
            # Cut in the middle, and a piece of a row may look like a whole one.
            yield torn_row(file, number, line.strip(), data.torn)
            return
        decode = _text_row if is_text else decode_row
        yield decode(file, number, line.strip())
    if data.torn is not None:
        yield torn_row(file, number + 1, b"", data.torn)


def _text_row(file: Path, number: int, line: bytes) -> RawRow:
    if not line:
        return RawRow(file, number, line, None)
    try:
        value = {"text": line.decode()}
    except UnicodeDecodeError as error:
        return bad_row(file, number, line, "bad_utf8", f"byte {error.start}: {error.reason}")
    return RawRow(file, number, msgspec.json.encode(value), value)
