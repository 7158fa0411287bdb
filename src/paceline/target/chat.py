"""The target's own chat template: turns to text to token ids, as an engine would do it."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jinja2
import msgspec

from paceline.durable.errors import RecipeError, TargetError
from paceline.rows.conversation import Message
from paceline.rows.rejection import TemplateRejected
from paceline.target.template import read_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
)

_OWN_ARGUMENTS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)

# A template is a program from a stranger's folder: besides Jinja's own errors it fails the way
# Python code does when a turn lacks what it reaches for.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


def load_tokenizer(folder: str, template_file: str | None = None) -> "PreTrainedTokenizerBase":
    """The tokenizer of a model folder, from local files alone; with a chat template of its own.

    Raises TargetError where the folder holds none, or one without a chat template and no
    `template_file` is given; RecipeError where that file cannot be read.
    """
    path = Path(folder)
    if not folder or not path.is_dir():
        raise TargetError(
            f"target.path {folder!r}: no such folder. It has to be a Transformers model folder "
            "(config.json, weights, tokenizer)."
        )
    if not any((path / name).is_file() for name in _TOKENIZER_FILES):
        raise TargetError(
            f"{path}: no tokenizer in this folder (none of {', '.join(_TOKENIZER_FILES)}). "
            "Copy the target's tokenizer files into it."
        )
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, LookupError, TypeError, ImportError) as error:
        raise TargetError(f"{path}: the tokenizer does not load: {error}") from error
    if template_file is not None:
        tokenizer.chat_template = read_template(template_file)
    if not tokenizer.chat_template:
        raise TargetError(
            f"{path}: the tokenizer has no chat template. Put the `chat_template.jinja` that the "
            "target is served with into the folder, or name it (corpus.template_file)."
        )
    return tokenizer


def check_template_args(template_args: dict[str, Any]) -> None:
    """Refuse arguments that are Paceline's own to set. Raises RecipeError."""
    taken = sorted(_OWN_ARGUMENTS & template_args.keys())
    if taken:
        raise RecipeError(
            f"corpus.template_args.{taken[0]}: set by Paceline itself, not an argument of a "
            "chat template. Remove it."
        )


class ChatTemplate:
    """Turns to text, as `tokenizer.apply_chat_template` does it."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", template_args: dict[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._args = template_args
        self._direct = _direct_template(tokenizer, template_args)

    def text(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None,
        *,
        generation_prompt: bool,
    ) -> str:
        """The text of `messages`. Raises TemplateRejected."""
        if self._direct is None or tools or not all(map(_is_plain, messages)):
            return render_text(
                self._tokenizer, messages, tools, self._args, generation_prompt=generation_prompt
            )
        try:
            return self._direct(messages, generation_prompt)
        except _TEMPLATE_ERRORS as error:
            raise TemplateRejected(f"{type(error).__name__}: {error}") from error


def _is_plain(message: Message) -> bool:
    return len(message) == 2 and type(message.get("content")) is str


def _direct_template(
    tokenizer: "PreTrainedTokenizerBase", template_args: dict[str, Any]
) -> Callable[[list[Message], bool], str] | None:
    """What renders turns that are role and text alone, without the copies made of all others.

    Rendering is repeated for every answer of a conversation, and those copies take longer than the
    template itself. None where the compiled template cannot be had, or says something else.
    """
    try:
        from transformers.utils.chat_template_utils import _compile_jinja_template

        compiled = _compile_jinja_template(tokenizer.get_chat_template())
        given = {**tokenizer.special_tokens_map, **template_args}
    except (ImportError, ValueError, AttributeError, TypeError, jinja2.TemplateError):
        return None

    def render(messages: list[Message], generation_prompt: bool) -> str:
        return str(
            compiled.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=generation_prompt,
                **given,
            )
        )

    for roles in _PROBES:
        messages = [{"role": role, "content": f" {role}\n{i} "} for i, role in enumerate(roles)]
        for prompt in (False, True):
            try:
                usual = render_text(
                    tokenizer, messages, None, template_args, generation_prompt=prompt
                )
            except TemplateRejected:
                continue
            try:
                if render(messages, prompt) != usual:
                    return None
            except _TEMPLATE_ERRORS:
                return None
    return render


_PROBES = (
    ("user",),
    ("user", "assistant"),
    ("system", "user", "assistant", "user", "assistant"),
    ("user", "assistant", "tool", "assistant", "user"),
)


def render_text(
    tokenizer: "PreTrainedTokenizerBase",
    messages: list[Message],
    tools: list[dict[str, Any]] | None,
    template_args: dict[str, Any],
    *,
    generation_prompt: bool,
) -> str:
    """The text that the chat template makes of `messages`. Raises TemplateRejected."""
    try:
        # A batch of one, because a bare empty list of turns makes Transformers stumble.
        [text] = tokenizer.apply_chat_template(
            [messages],
            tools=list[Any](tools) if tools else None,
            add_generation_prompt=generation_prompt,
            tokenize=False,
            **template_args,
        )
    except _TEMPLATE_ERRORS as error:
        raise TemplateRejected(f"{type(error).__name__}: {error}") from error
    return str(text)


def encode(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """Token ids of rendered text; the template has put every special token there already."""
    return list(tokenizer.encode(text, add_special_tokens=False, verbose=False))


def writes_date(
    tokenizer: "PreTrainedTokenizerBase", template_args: dict[str, Any]
) -> Literal["", "yes", "unless_given"]:
    """Whether the template may write today's date, so that prompts depend on the day.

    `unless_given`: `corpus.template_args.date_string` would fix it, and is not set.
    """
    template = str(tokenizer.chat_template)
    if "strftime_now" not in template:
        return ""
    if "date_string" not in template:
        return "yes"
    return "" if "date_string" in template_args else "unless_given"


def template_digest(tokenizer: "PreTrainedTokenizerBase") -> str:
    """32 hex digits over the text of the chat template (all of them, where it has several)."""
    text = msgspec.json.encode(tokenizer.chat_template, order="deterministic")
    return hashlib.sha256(text).hexdigest()[:32]


def tokenizer_digest(tokenizer: "PreTrainedTokenizerBase") -> str:
    """32 hex digits over everything that maps text to ids; slow, call it once.

    Truncation and padding are left out: they are settings of the last call, not of the tokenizer.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        state: dict[str, Any] = msgspec.json.decode(backend.to_str())
        content: Any = {k: v for k, v in state.items() if k not in ("truncation", "padding")}
    else:
        content = [sorted(tokenizer.get_vocab().items()), tokenizer.all_special_tokens]
    return hashlib.sha256(msgspec.json.encode(content, order="deterministic")).hexdigest()[:32]


def rendering_identity(tokenizer: "PreTrainedTokenizerBase", template_args: dict[str, Any]) -> str:
    """32 hex digits over template, its arguments and tokenizer: the part that all ids share.

    Compute it once per process and hand it to `sample_id` and `answer_sample`.
    """
    parts = [template_digest(tokenizer), template_args, tokenizer_digest(tokenizer)]
    return hashlib.sha256(msgspec.json.encode(parts, order="deterministic")).hexdigest()[:32]
