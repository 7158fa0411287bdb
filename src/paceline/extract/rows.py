"""Finding the samples of a corpus file without holding their tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from paceline.durable.errors import DataError
from paceline.types import Sample, Split
from paceline.types.sample import read_samples


@dataclass(frozen=True)
class Rows:
    """The samples to extract, in the corpus's order."""

    sample_ids: tuple[str, ...]
    lengths: tuple[int, ...]
    """Tokens."""

    loss_tokens: tuple[int, ...]
    """Trainable tokens."""

    positions: tuple[int, ...]
    """Where each sample's line begins in the file, bytes."""

    heldout: int
    """Samples left out because only the score may see them."""

    without_loss: int
    """Samples left out because nothing in them is trained on."""


def index_rows(path: Path, *, vocab_size: int, max_position: int) -> Rows:
    """Read a corpus file once; keeps ids and counts, not tokens.

    Raises DataError, naming file and line, for a line that is no sample, a sample longer than
    `max_position` tokens or with an id outside of `vocab_size`, and for a sample that comes
    twice; naming the file where nothing is left to extract.
    """
    found: dict[str, tuple[int, int, int]] = {}
    heldout = without_loss = position = 0
    with path.open("rb") as lines:
        for number, (sample, line) in enumerate(zip(read_samples(path), lines, strict=True), 1):
            start, position = position, position + len(line)
            if sample.split is Split.HELDOUT:
                heldout += 1
            elif sample.num_loss_tokens == 0:
                without_loss += 1
            else:
                where = f"{path}, line {number} (sample {sample.sample_id})"
                _check(sample, where, vocab_size, max_position)
                if sample.sample_id in found:
                    raise DataError(f"{where}: the sample came before. Make the corpus again.")
                length = len(sample.input_ids)
                found[sample.sample_id] = (length, sample.num_loss_tokens, start)
    if not found:
        raise DataError(
            f"{path}: none of its {heldout + without_loss} samples can be trained on ({heldout} "
            f"are held out, {without_loss} have no answer). Add a source with `split: train`."
        )
    lengths, loss_tokens, positions = zip(*found.values(), strict=True)
    return Rows(tuple(found), lengths, loss_tokens, positions, heldout, without_loss)


def read_rows(path: Path, positions: Sequence[int]) -> list[Sample]:
    """The samples whose lines begin at `positions`. Raises DataError where one does not."""
    decoder = msgspec.json.Decoder(Sample)
    samples = []
    with path.open("rb") as file:
        for position in positions:
            file.seek(position)
            try:
                samples.append(decoder.decode(file.readline()))
            except (msgspec.MsgspecError, UnicodeError) as error:
                raise DataError(
                    f"{path}, byte {position}: no sample begins here ({error}). The file changed "
                    "during the extraction: run it again."
                ) from error
    return samples


def _check(sample: Sample, where: str, vocab_size: int, max_position: int) -> None:
    if len(sample.input_ids) > max_position:
        raise DataError(
            f"{where}: {len(sample.input_ids)} tokens, the target takes {max_position}. Lower "
            "corpus.max_length."
        )
    low, high = min(sample.input_ids), max(sample.input_ids)
    if low < 0 or high >= vocab_size:
        raise DataError(
            f"{where}: token ids from {low} to {high}, the target has {vocab_size}. The corpus "
            "was made with another tokenizer."
        )
