"""A sample as the page has it: text in pieces, each trained on or not, long runs cut short."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Literal

from paceline.corpus.lint.gallery import Chosen
from paceline.corpus.preview import decoded, segments
from paceline.types import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TOKENS = 160_000
"""Tokens that the page shows, all samples together."""

_LEAST, _MOST = 200, 1500
"""Tokens shown of one sample."""

_RUNS = 40
"""Runs of trained and other tokens shown of one sample."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text of a sample, or a note where text was left out."""

    kind: Literal["trained", "context", "cut"]
    text: str
    is_special: bool = False
    """A token that stands for no text, spelled out."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A sample to show."""

    sample_id: str
    prompt_id: str
    source: str
    split: str
    labels: tuple[str, ...]
    tokens: int
    trained: int
    pieces: tuple[Piece, ...]


def shown(chosen: Sequence[Chosen], tokenizer: "PreTrainedTokenizerBase") -> list[Shown]:
    """Those to show; the more there are, the less is shown of each."""
    most = min(_MOST, max(_LEAST, _TOKENS // max(1, len(chosen))))
    specials = frozenset(tokenizer.all_special_ids) | {
        i for i, token in tokenizer.added_tokens_decoder.items() if token.special
    }
    return [
        Shown(
            sample_id=item.sample.sample_id,
            prompt_id=item.sample.prompt_id,
            source=item.sample.source,
            split=item.sample.split.value,
            labels=item.labels,
            tokens=len(item.sample.input_ids),
            trained=item.sample.num_loss_tokens,
            pieces=tuple(pieces(item.sample, tokenizer, specials, most)),
        )
        for item in chosen
    ]


def pieces(
    sample: Sample, tokenizer: "PreTrainedTokenizerBase", specials: frozenset[int], most: int
) -> Iterator[Piece]:
    """The text of a sample, about `most` tokens of it: each run is cut in its middle.

    So the places where training begins and ends stay in sight.
    """
    runs = list(segments(sample))
    each = max(40, most // min(len(runs), _RUNS)) if runs else most
    gap = range(_RUNS // 2, len(runs) - _RUNS // 2)
    for number, (ids, is_trained) in enumerate(runs):
        if number in gap:
            if number == gap.start:
                tokens = sum(len(runs[place][0]) for place in gap)
                yield Piece("cut", f"{tokens:,} tokens of {len(gap)} runs are not shown")
            continue
        kind: Literal["trained", "context"] = "trained" if is_trained else "context"
        if len(ids) <= each + 20:
            yield from _run(ids, kind, tokenizer, specials)
            continue
        head, tail = each - each // 3, each // 3
        yield from _run(ids[:head], kind, tokenizer, specials)
        yield Piece("cut", f"{len(ids) - each:,} {_NAMES[kind]} tokens are not shown")
        yield from _run(ids[-tail:], kind, tokenizer, specials)


_NAMES = {"trained": "trained", "context": "untrained"}


def _run(
    ids: list[int],
    kind: Literal["trained", "context"],
    tokenizer: "PreTrainedTokenizerBase",
    specials: frozenset[int],
) -> Iterator[Piece]:
    for is_special, group in groupby(ids, key=specials.__contains__):
        text = decoded(list(group), tokenizer)
        yield Piece(kind, text.replace("\n", "↵\n") if kind == "trained" else text, is_special)


def shortened(text: str, most: int) -> str:
    """A text cut in its middle."""
    if len(text) <= most:
        return text
    head, tail = most - most // 3, most // 3
    return f"{text[:head]} … {len(text) - most:,} characters are not shown … {text[-tail:]}"
