"""Finding the samples of a corpus file without holding their tokens."""

from array import array
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from paceline.durable.checksum import Around, crc64, crc64_hex
from paceline.durable.errors import DataError
from paceline.types.sample import Sample, Split
from paceline.types.sample_ids import IdsBuilder, SampleIds

_BLOCK = 1 << 20
_HIGHEST = 2**31 - 1
"""Token ids at rest are int32."""


@dataclass(frozen=True, eq=False)
class Rows:
    """The N samples to capture, in the corpus's order; about 40 bytes each."""

    sample_ids: SampleIds
    """N ids."""

    lengths: npt.NDArray[np.int32]
    """Tokens, int32 [N]."""

    loss_tokens: npt.NDArray[np.int32]
    """Trainable tokens, int32 [N]."""

    positions: npt.NDArray[np.int64]
    """Where each sample's line begins in the file, bytes, int64 [N]."""

    heldout: int
    """Samples left out because only the score may see them."""

    without_loss: int
    """Samples left out because nothing in them is trained on."""

    other: int
    """Samples left out though they could be trained on: of another split than was asked for."""

    read: int
    """Lines of the file: samples of all kinds."""

    digest: str
    """Of the file as it was read, in the form of `digest_file`."""

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """Of all samples."""
        return int(self.lengths.sum(dtype=np.int64))


class RowTokens(msgspec.Struct, gc=False):
    """What a line says of a sample's tokens."""

    sample_id: str
    input_ids: list[int]
    loss_spans: list[tuple[int, int]]


class _Row(RowTokens, gc=False):
    """What decides whether and where a sample is captured."""

    split: Split


def index_rows(
    path: Path,
    *,
    vocab_size: int | None,
    max_position: int | None,
    only: Split | None = None,
    around: Around = nullcontext,
) -> Rows:
    """Read a corpus file once; keeps ids and counts, not tokens. `around` is entered for each read.

    `only` is the split whose samples are kept; None keeps all but the held-out ones.

    Raises DataError, naming file and line, for a line that is no sample, a sample longer than
    `max_position` tokens or with an id outside of `vocab_size` (None: any), and for a sample that
    comes twice, where it is kept; naming the file where none is kept.
    """
    scan = _Scan(path, vocab_size or _HIGHEST, max_position or _HIGHEST, only)
    checksum = size = 0
    rest = b""
    with around():
        file = path.open("rb")
    with file:
        while True:
            with around():
                block = file.read(_BLOCK)
            if not block:
                break
            checksum, size = crc64(block, checksum), size + len(block)
            *lines, rest = (rest + block).split(b"\n")
            scan.add(lines)
    if rest:
        scan.add([rest])
    return scan.rows(f"{crc64_hex(checksum)}-{size}")


def read_rows(path: Path, positions: Sequence[int]) -> list[Sample]:
    """The samples whose lines begin at `positions`. Raises DataError where one does not."""
    return list(_read(path, positions, Sample))


def read_tokens(path: Path, positions: Sequence[int]) -> Iterator[RowTokens]:
    """The tokens of the samples whose lines begin at `positions`; raises as `read_rows`."""
    return _read(path, positions, RowTokens)


def _read(path: Path, positions: Sequence[int], kind: Any) -> Iterator[Any]:
    decoder = msgspec.json.Decoder(kind)
    with path.open("rb") as file:
        for position in positions:
            file.seek(position)
            try:
                yield decoder.decode(file.readline())
            except (msgspec.MsgspecError, UnicodeError) as error:
                raise DataError(
                    f"{path}, byte {position}: no sample begins here ({error}). The file changed "
                    "since it was first read: run this again."
                ) from error


class _Scan:
    """Takes in a file's lines, in order."""

    def __init__(self, path: Path, vocab_size: int, max_position: int, only: Split | None) -> None:
        self._path, self._vocab_size, self._max_position = path, vocab_size, max_position
        self._only = only
        self._decoder = msgspec.json.Decoder(_Row)
        # Limits in the type are checked as the digits are read, which costs next to nothing.
        self._checked = msgspec.json.Decoder(_row_below(vocab_size))
        self._ids = IdsBuilder()
        self._lengths, self._loss_tokens = array("i"), array("i")
        self._positions = array("q")
        self._heldout = self._without_loss = self._other = self._position = self._number = 0

    def add(self, lines: list[bytes]) -> None:
        decode, longest, heldout = self._checked.decode, self._max_position, Split.HELDOUT
        only = self._only
        number, position = self._number, self._position
        ids, lengths, losses, positions = [], [], [], []
        # One row at a time: thousands of them at once would not stay in the processor's cache.
        for line in lines:
            start, position, number = position, position + len(line) + 1, number + 1
            try:
                row: _Row = decode(line)
            except (msgspec.MsgspecError, UnicodeError):
                row = self._decode(number, line)
            if row.split is heldout:
                self._heldout += 1
                continue
            loss_tokens = 0
            for begin, end in row.loss_spans:
                loss_tokens += end - begin
            if loss_tokens == 0:
                self._without_loss += 1
                continue
            if only is not None and row.split is not only:
                self._other += 1
                continue
            length = len(row.input_ids)
            if length > longest:
                raise DataError(
                    f"{self._where(number, row.sample_id)}: {length} tokens, the target takes "
                    f"{longest}. Lower corpus.max_length."
                )
            ids.append(row.sample_id)
            lengths.append(length)
            losses.append(loss_tokens)
            positions.append(start)
        self._number, self._position = number, position
        self._ids.add(ids)
        self._lengths.extend(lengths)
        self._loss_tokens.extend(losses)
        self._positions.extend(positions)

    def rows(self, digest: str) -> Rows:
        if not self._lengths:
            raise DataError(self._nothing_left())
        ids = self._ids.ids()
        twice = ids.first_repeated()
        if twice is not None:
            where = self._where(self._line_at(self._positions[twice]), ids[twice])
            raise DataError(f"{where}: the sample came before. Make the corpus again.")
        return Rows(
            ids,
            np.frombuffer(self._lengths, dtype=np.int32),
            np.frombuffer(self._loss_tokens, dtype=np.int32),
            np.frombuffer(self._positions, dtype=np.int64),
            self._heldout,
            self._without_loss,
            self._other,
            self._number,
            digest,
        )

    def _nothing_left(self) -> str:
        left_out = self._heldout + self._without_loss + self._other
        reasons = f"{self._heldout} are held out, {self._without_loss} have no answer"
        if self._only is None:
            return (
                f"{self._path}: none of its {left_out} samples can be trained on ({reasons}). Add "
                "a source with `split: train`."
            )
        advice = "Raise" if self._only is Split.VALIDATION else "Lower"
        return (
            f"{self._path}: none of its {left_out} samples is a {self._only} sample with an answer "
            f"({reasons}, {self._other} are of the other split). {advice} "
            "corpus.validation_fraction, or add a source with `split: train`."
        )

    def _decode(self, number: int, line: bytes) -> _Row:
        """A line that was refused: says why, or takes it where the reason is none of ours."""
        try:
            row = self._decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise DataError(
                f"{self._path}, line {number}: not a sample ({error}). The file was damaged after "
                "it was written: remove the stage's folder and run the stage again."
            ) from error
        low, high = min(row.input_ids, default=0), max(row.input_ids, default=0)
        is_of_split = row.split is self._only or (
            self._only is None and row.split is not Split.HELDOUT
        )
        is_wanted = is_of_split and any(b < e for b, e in row.loss_spans)
        if is_wanted and (low < 0 or high >= self._vocab_size):
            raise DataError(
                f"{self._where(number, row.sample_id)}: token ids from {low} to {high}, the "
                f"target has {self._vocab_size}. The corpus was made with another tokenizer."
            )
        return row

    def _where(self, number: int, sample_id: str) -> str:
        return f"{self._path}, line {number} (sample {sample_id})"

    def _line_at(self, position: int) -> int:
        with self._path.open("rb") as file:
            return file.read(position).count(b"\n") + 1


def _row_below(vocab_size: int) -> Any:
    token = Annotated[int, msgspec.Meta(ge=0, lt=vocab_size)]
    return msgspec.defstruct("_CheckedRow", [("input_ids", list[token])], bases=(_Row,), gc=False)
