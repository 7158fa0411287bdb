"""What there is to know of the chat template that the data were rendered with."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from paceline.corpus.mask import Renderer
from paceline.corpus.preview import decoded
from paceline.recipe.schema import Recipe
from paceline.target.chat import template_digest, writes_date
from paceline.target.template import chat_template

_SWITCHES = ("enable_thinking", "reasoning_effort")
"""Arguments by which templates turn reasoning on and off."""

_TURNS = [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Hi!"}]


@dataclass(frozen=True)
class TemplateFacts:
    """The template of the target, with its arguments."""

    digest: str
    args: dict[str, Any]
    file: str
    """`corpus.template_file`, or empty for the target's own."""
    dated: Literal["", "yes", "unless_given"]
    """`writes_date`."""
    unset: tuple[str, ...]
    """Switches of reasoning that the template asks for and nobody has set."""
    has_two: bool
    """Whether the folder has another template beside the one in use."""
    ends: tuple[str, ...]
    """Tokens that end an answer, spelled out."""
    prompt: str
    """A question as an engine is handed it."""
    answered: str
    """The question with its answer."""


def template_facts(recipe: Recipe, renderer: Renderer) -> TemplateFacts:
    """Look at the template, and render a question and its answer with it."""
    tokenizer, args = renderer.tokenizer, recipe.corpus.template_args
    text = str(tokenizer.chat_template)
    file = recipe.corpus.template_file or ""
    return TemplateFacts(
        digest=template_digest(tokenizer),
        args=args,
        file=file,
        dated=writes_date(tokenizer, args),
        unset=tuple(n for n in _SWITCHES if n not in args and re.search(rf"\b{n}\b", text)),
        has_two=not file and _has_two(Path(recipe.target.path)),
        ends=tuple(decoded([token], tokenizer) for token in sorted(renderer.end.ids)),
        prompt=renderer.template.text(_TURNS[:1], None, generation_prompt=True),
        answered=renderer.template.text(_TURNS, None, generation_prompt=False),
    )


def _has_two(folder: Path) -> bool:
    """Whether `tokenizer_config.json` has another template than the file that goes before it."""
    config = folder / "tokenizer_config.json"
    if not (folder / "chat_template.jinja").is_file() or not config.is_file():
        return False
    other = msgspec.json.decode(config.read_bytes()).get("chat_template")
    return isinstance(other, str) and other.strip() != chat_template(folder).strip()
