"""The texts that are counted to choose a draft vocabulary, as a stream of pieces."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from paceline.durable.errors import DataError
from paceline.recipe.drafter_inputs import TEXT_SUFFIXES

_PIECE = 1 << 16
"""Characters that are read at a time."""

_LONGEST_ROW = 64 << 20
"""Characters of a row; a longer one is no row."""

_BETWEEN = re.compile(r"[\s,]*")

_TURNS = ("messages", "conversations", "prompt")
_PLAIN = ("text", "prompt")


def read_texts(path: Path) -> Iterator[str]:
    """The text of a .txt or .md file, or of the rows of a .jsonl or .json file, in pieces.

    A plain text comes in pieces of about 64 Ki characters that end at a line's end. Of a row come
    the contents of its `messages` or `conversations`, and what `text` and `prompt` say. Memory
    holds a piece or a row, never the file.

    Raises DataError naming file and row (or line) where one cannot be read, or has none of these.
    """
    try:
        # What is not UTF-8 comes through as half characters, which are found row by row.
        with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            if path.suffix.lower() in TEXT_SUFFIXES:
                yield from _pieces(path, file)
                return
            for number, row in _rows(path, file):
                for text in _texts(path, number, row):
                    if _half_character(text) is not None:
                        raise _not_text(f"{path}, row {number}")
                    yield text
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}).") from error


def _pieces(path: Path, file: TextIO) -> Iterator[str]:
    lines = 0
    while piece := file.read(_PIECE):
        piece += file.readline(_PIECE)
        bad = _half_character(piece)
        if bad is not None:
            raise _not_text(f"{path}, line {lines + 1 + piece.count(chr(10), 0, bad)}")
        lines += piece.count("\n")
        yield piece


def _half_character(text: str) -> int | None:
    """Where half of a surrogate pair stands, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


def _not_text(where: str) -> DataError:
    return DataError(f"{where}: not UTF-8 text. Convert the file, or mend it there.")


def _rows(path: Path, file: TextIO) -> Iterator[tuple[int, Any]]:
    """Numbers from 1 and JSON values: one after another, or the elements of one array."""
    decoder = json.JSONDecoder()
    text, place, number, ended = "", 0, 0, False
    is_array: bool | None = None
    while True:
        place = _BETWEEN.match(text, place).end()  # pyright: ignore[reportOptionalMemberAccess]
        if place == len(text):
            text, place = file.read(_PIECE), 0
            if not text:
                if is_array and not ended:
                    raise DataError(f"{path}, after row {number}: the array has no end.")
                return
            continue
        if ended:
            raise DataError(f"{path}: something follows the array's end. Give rows as .jsonl.")
        if is_array is None:
            is_array = text[place] == "["
            place += is_array
            continue
        if is_array and text[place] == "]":
            ended, place = True, place + 1
            continue
        try:
            row, end = decoder.raw_decode(text, place)
        except (json.JSONDecodeError, RecursionError) as error:
            # Perhaps the row goes on; reading as much again each time scans it a few times only.
            text, place = text[place:], 0
            more = file.read(max(_PIECE, len(text))) if len(text) < _LONGEST_ROW else ""
            if not more:
                raise DataError(
                    f"{path}, row {number + 1}: not JSON ({error}). Mend or remove the row."
                ) from error
            text += more
            continue
        number, place = number + 1, end
        yield number, row


def _texts(path: Path, number: int, row: Any) -> Iterator[str]:
    where = f"{path}, row {number}"
    if not isinstance(row, dict):
        raise DataError(f"{where}: a {type(row).__name__}, not an object with `text` or turns.")
    found = [row[key] for key in _PLAIN if isinstance(row.get(key), str)]
    turns = [row[key] for key in _TURNS if isinstance(row.get(key), list)]
    if not found and not turns:
        names = ", ".join(sorted(row)[:8]) or "no keys"
        raise DataError(
            f"{where}: no `text`, `prompt`, `messages` or `conversations` to count; it has {names}."
        )
    yield from found
    for turn in (turn for many in turns for turn in many):
        if not isinstance(turn, dict):
            raise DataError(f"{where}: a turn is a {type(turn).__name__}, not an object.")
        content = turn.get("content", turn.get("value"))
        parts = content if isinstance(content, list) else [content]
        for part in parts:
            text = part.get("text") if isinstance(part, dict) else part
            if isinstance(text, str):
                yield text
