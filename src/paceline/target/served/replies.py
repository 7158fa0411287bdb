"""What a server said to one request, and what follows from it."""

import contextlib
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

import msgspec

_LONGEST_MESSAGE = 300

_TRANSIENT = frozenset({408, 409, 423, 425, 429})
"""Statuses below 500 that may be another one a moment later."""
_OF_THE_ROW = frozenset({400, 406, 410, 411, 413, 414, 415, 422, 431})
"""What the server has against this very prompt, and would have again."""
BUSY = frozenset({429, 503})
"""The server has too much to do, whatever the prompt."""

_NOT_JSON = (msgspec.MsgspecError, UnicodeError, RecursionError)
"""What decoding raises; the last one for values too deep in one another."""

_RETRIED_FINISHES = frozenset({"abort", "error"})
"""The server gave up on its own account; the prompt has not been answered."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer, as the server tells it."""

    text: str
    finish: str
    """`finish_reason`: `stop`, `length`, `tool_calls`, `content_filter`, or another word."""
    ids: list[int] | None = None
    """The generated token ids; None where the server does not tell."""
    prompt_ids: list[int] | None = None
    """The ids that it processed before them; None where it does not tell."""
    prompt_tokens: int | None = None
    """How many those were, by its count."""
    is_all: bool = True
    """False where parts of what was generated, such as reasoning, stand beside `text`."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """The server will not answer this prompt; another try is the same."""

    message: str


@dataclass(frozen=True, slots=True)
class Unusable:
    """The endpoint answers no prompt at all, until somebody mends it or the recipe."""

    message: str


@dataclass(frozen=True, slots=True)
class Failed:
    """No answer this time."""

    kind: str
    """A word or two for the statistics: `connect`, `timeout`, `status 503`."""
    message: str
    retry_after: float | None = None
    """Seconds that the server asks to be left alone for."""
    is_busy: bool = False
    """The server had too much to do, which says nothing of the prompt."""


class _Message(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    message: _Message | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None


class _Body(msgspec.Struct):
    choices: list[_Choice]
    prompt_token_ids: list[int] | None = None
    usage: _Usage | None = None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


def outcome_of(
    status: int, headers: Mapping[str, str], body: bytes
) -> Reply | Rejected | Unusable | Failed:
    """Read the answer to a request for a completion, of either kind."""
    if status != 200:
        return _refusal(status, headers, body)
    try:
        decoded = msgspec.json.decode(body, type=_Body)
    except _NOT_JSON as error:
        return Failed("malformed", f"answers 200 with no completion ({error})")
    if len(decoded.choices) != 1:
        return Failed("malformed", f"answers with {len(decoded.choices)} choices, not one")
    choice = decoded.choices[0]
    message = choice.message or _Message(content=choice.text)
    finish = choice.finish_reason
    if finish is None or finish in _RETRIED_FINISHES:
        return Failed("malformed", f"ended an answer with finish_reason {finish!r}")
    if message.content is None and choice.token_ids is None and finish in ("stop", "length"):
        return Failed("malformed", "answers with neither text nor token_ids")
    beside = message.reasoning or message.reasoning_content or message.tool_calls
    return Reply(
        text=message.content or "",
        finish=finish,
        ids=choice.token_ids,
        prompt_ids=(
            decoded.prompt_token_ids if choice.prompt_token_ids is None else choice.prompt_token_ids
        ),
        prompt_tokens=None if decoded.usage is None else decoded.usage.prompt_tokens,
        is_all=not beside,
    )


def models_of(
    status: int, headers: Mapping[str, str], body: bytes
) -> tuple[str, ...] | Unusable | Failed:
    """Read the answer to `GET /models`."""
    if status != 200:
        refusal = _refusal(status, headers, body)
        return Unusable(refusal.message) if isinstance(refusal, Rejected) else refusal
    try:
        models = msgspec.json.decode(body, type=_Models)
    except _NOT_JSON as error:
        return Failed("malformed", f"answers GET /models with no list of models ({error})")
    return tuple(model.id for model in models.data)


def _refusal(status: int, headers: Mapping[str, str], body: bytes) -> Rejected | Unusable | Failed:
    said = f"status {status}: {_said(body)}"
    if status >= 500 or status in _TRANSIENT:
        wait = _retry_after(headers.get("Retry-After"))
        return Failed(f"status {status}", said, wait, is_busy=status in BUSY)
    if status in _OF_THE_ROW:
        return Rejected(said)
    if 300 <= status < 400:
        return Unusable(f"status {status}: leads to {headers.get('Location', 'nowhere')}")
    return Unusable(said)


def _said(body: bytes) -> str:
    """The server's own words, in one line."""
    text = body[: 16 * _LONGEST_MESSAGE].decode(errors="replace")
    with contextlib.suppress(*_NOT_JSON):
        told = msgspec.json.decode(body)
        for key in ("error", "message", "detail"):
            if isinstance(told, dict) and told.get(key):
                told = told[key]
        text = told if isinstance(told, str) else text
    line = re.sub(r"\s+", " ", text).strip()
    return line[:_LONGEST_MESSAGE] or "no reason given"


def _retry_after(value: str | None) -> float | None:
    if value is None:
        return None
    with contextlib.suppress(ValueError):
        return max(0.0, float(value))
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None
