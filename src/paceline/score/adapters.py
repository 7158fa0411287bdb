"""Rows of published data sets as questions: each adapter is a function of one row.

The column names are those of the published files: `question.jsonl` of MT-Bench, as FastChat, EAGLE
and Spec-Bench have it (`turns`, `category`), and its copy on the hub (`prompt`); GSM8K
(`question`); HumanEval (`prompt`); MATH-500 (`problem`, `subject`); MBPP (`prompt` of the sanitised
part, `text` of the full one); Alpaca (`instruction`, `input`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.rows.conversation import Message, conversation_of
from paceline.rows.ids import prompt_turns
from paceline.rows.rejection import RowRejected

Row = Mapping[str, Any]

_REASON = "\nPlease reason step by step, and put your final answer within \\boxed{}."
_SOLVE = "Write a solution to the following problem and make sure that it passes the tests:\n"


@dataclass(frozen=True, kw_only=True)
class Question:
    """What one row asks."""

    messages: tuple[Message, ...]
    """Up to the first user turn that the target answers."""
    later: tuple[str, ...] = ()
    """User turns after it, each asked after the target's own answers."""
    tools: list[dict[str, Any]] | None = None
    domain: str | None = None
    """What the row says that it is about."""


def question_of(row: Row, adapter: str, *, asks: bool) -> Question:
    """What a row asks; `asks` puts the harnesses' instruction around problems and code.

    Raises RowRejected where the row is not of this data set.
    """
    return _ADAPTERS[adapter](row, asks)


def _prompts(row: Row, asks: bool) -> Question:  # noqa: ARG001  one signature for all
    if row.get("turns") is not None:
        return _turns(row, "turns")
    text = row.get("text")
    if isinstance(text, str) and row.get("prompt") is None and row.get("messages") is None:
        row = {**row, "prompt": text}
    conversation = conversation_of(dict(row))
    messages = prompt_turns(conversation.messages)
    if not messages:
        raise RowRejected("no_user_turn", "there is no prompt to answer")
    return Question(messages=tuple(messages), tools=conversation.tools, domain=_domain(row))


def _mt_bench(row: Row, asks: bool) -> Question:  # noqa: ARG001
    return _turns(row, "turns" if "turns" in row else "prompt")


def _turns(row: Row, column: str) -> Question:
    turns = row.get(column)
    if not isinstance(turns, list) or not all(isinstance(t, str) and t.strip() for t in turns):
        raise RowRejected("bad_turns", f"`{column}` is not a list of texts")
    if not turns:
        raise RowRejected("bad_turns", f"`{column}` is empty")
    first, *later = turns
    return Question(messages=_user(first), later=tuple(later), domain=_domain(row))


def _gsm8k(row: Row, asks: bool) -> Question:
    return Question(messages=_user(_text(row, "question") + (_REASON if asks else "")))


def _math500(row: Row, asks: bool) -> Question:
    text = _text(row, "problem") + (_REASON if asks else "")
    return Question(messages=_user(text), domain=_domain(row, "subject"))


def _humaneval(row: Row, asks: bool) -> Question:
    code = _text(row, "prompt")
    return Question(messages=_user(f"{_SOLVE}```python\n{code}\n```" if asks else code))


def _mbpp(row: Row, asks: bool) -> Question:  # noqa: ARG001
    return Question(messages=_user(_text(row, "prompt" if "prompt" in row else "text")))


def _alpaca(row: Row, asks: bool) -> Question:  # noqa: ARG001
    instruction, given = _text(row, "instruction"), row.get("input") or ""
    if not isinstance(given, str):
        raise RowRejected("bad_column", f"`input` is a {type(given).__name__}, not a text")
    return Question(messages=_user(f"{instruction}\n\nInput:\n{given}" if given else instruction))


_ADAPTERS: Mapping[str, Callable[[Row, bool], Question]] = {
    "prompts": _prompts,
    "mt_bench": _mt_bench,
    "gsm8k": _gsm8k,
    "humaneval": _humaneval,
    "math500": _math500,
    "mbpp": _mbpp,
    "alpaca": _alpaca,
}


def _user(text: str) -> tuple[Message, ...]:
    return ({"role": "user", "content": text},)


def _text(row: Row, column: str) -> str:
    text = row.get(column)
    if not isinstance(text, str) or not text.strip():
        has = ", ".join(sorted(row)[:8]) or "no columns"
        raise RowRejected("no_column", f"no text in `{column}`; the row has {has}")
    return text


def _domain(row: Row, column: str = "category") -> str | None:
    value = row.get(column) or row.get("domain")
    return value if isinstance(value, str) and value else None
