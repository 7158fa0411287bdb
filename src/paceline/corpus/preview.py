"""A look at one sample's mask: what is trained is green, what is only read is dim."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.text import Text

from paceline.types import Sample
from paceline.watch.words import visible

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TRAINED = "bold green"
CONTEXT = "dim"


def preview(sample: Sample, tokenizer: "PreTrainedTokenizerBase") -> Text:
    """The whole sample as text, special tokens spelled out, coloured by its loss spans.

    A line feed that is trained is shown as `↵` before it breaks the line, because otherwise a
    mask that is off by one line feed looks like a right one.
    """
    text = Text()
    for ids, is_trained in segments(sample):
        shown = visible(decoded(ids, tokenizer))
        if is_trained:
            text.append(shown.replace("\n", "↵\n"), TRAINED)
        else:
            text.append(shown, CONTEXT)
    return text


def segments(sample: Sample) -> Iterator[tuple[list[int], bool]]:
    """The ids of a sample in order, in runs that are trained on and runs that are not."""
    position = 0
    for start, end in [*sample.loss_spans, (len(sample.input_ids),) * 2]:
        for part, is_trained in (
            (sample.input_ids[position:start], False),
            (sample.input_ids[start:end], True),
        ):
            if part:
                yield part, is_trained
        position = end


def decoded(ids: list[int], tokenizer: "PreTrainedTokenizerBase") -> str:
    """Their text, special tokens spelled out."""
    if not ids:
        return ""
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
