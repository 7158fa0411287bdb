"""A look at one sample's mask: what is trained is green, what is only read is dim."""

from typing import TYPE_CHECKING

from rich.text import Text

from paceline.types import Sample

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
    position = 0
    for start, end in [*sample.loss_spans, (len(sample.input_ids),) * 2]:
        text.append(_decode(sample.input_ids[position:start], tokenizer), CONTEXT)
        text.append(_decode(sample.input_ids[start:end], tokenizer).replace("\n", "↵\n"), TRAINED)
        position = end
    return text


def _decode(ids: list[int], tokenizer: "PreTrainedTokenizerBase") -> str:
    if not ids:
        return ""
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
