"""What ends a turn: the tokens at which an engine stops, or the text that a template closes with.

Read from the tokenizer, the target's generation config and a probe of the template, because the
three disagree in the wild (base models whose `eos_token` is not what their template writes).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from paceline.durable.errors import TargetError
from paceline.rows.rejection import TemplateRejected
from paceline.target.chat import encode, render_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROBE = "qzxPROBEqzx"


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """How an assistant turn ends."""

    ids: frozenset[int]
    """Ids that stop an engine; each counts as generated."""
    closing: str
    """What the template writes after the content; trailing text where no end token is in it."""
    in_closing: int
    """End tokens in it: some templates put a second one after a conversation's last turn."""


def turn_end(
    tokenizer: "PreTrainedTokenizerBase", template_args: dict[str, Any], folder: Path | None = None
) -> TurnEnd:
    """Find out how assistant turns end; `folder` is the target's, for its generation config.

    Raises TargetError for a template that cannot render one question and its answer.
    """
    probe = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _PROBE}]
    try:
        text = render_text(tokenizer, probe, None, template_args, generation_prompt=False)
        render_text(tokenizer, probe[:1], None, template_args, generation_prompt=True)
    except TemplateRejected as error:
        raise TargetError(
            "the target's chat template cannot render one question and its answer "
            f"({error.detail}). Repair `chat_template.jinja` or corpus.template_args."
        ) from error
    before, found, closing = text.rpartition(_PROBE)
    if not found:
        raise TargetError(
            "the target's chat template leaves the content of an assistant turn out "
            f"(it ends in {before[-80:]!r}). Repair `chat_template.jinja`."
        )
    ids = set(_generation_config_ends(folder))
    if isinstance(tokenizer.eos_token_id, int):
        ids.add(tokenizer.eos_token_id)
    closing_ids = encode(tokenizer, closing)
    if closing_ids and _is_special(tokenizer, closing_ids[0]):
        ids.add(closing_ids[0])
    return TurnEnd(frozenset(ids), closing, sum(token in ids for token in closing_ids))


def _is_special(tokenizer: "PreTrainedTokenizerBase", token: int) -> bool:
    added = tokenizer.added_tokens_decoder.get(token)
    return token in tokenizer.all_special_ids or (added is not None and added.special)


def _generation_config_ends(folder: Path | None) -> list[int]:
    path = None if folder is None else folder / "generation_config.json"
    if path is None or not path.is_file():
        return []
    try:
        ends = msgspec.json.decode(path.read_bytes()).get("eos_token_id")
    except (msgspec.MsgspecError, UnicodeError, AttributeError) as error:
        raise TargetError(f"{path}: not a JSON object ({error}).") from error
    ends = ends if isinstance(ends, list) else [ends]
    return [end for end in ends if isinstance(end, int)]
