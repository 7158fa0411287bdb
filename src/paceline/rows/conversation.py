"""Rows of any supported dialect as one form of conversation, so that equal ones look equal."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from paceline.rows.rejection import RowRejected

Message = dict[str, Any]
"""`role`, `content` and, where present, `tool_calls`, `tool_call_id`, `name`, reasoning."""

ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
}

_CARRIED = ("name", "tool_call_id", "reasoning_content", "reasoning", "thinking")
"""What else a chat template reads from a turn; bookkeeping of a data set is left behind."""


_TURNS = ("messages", "conversations", "prompt")

_TEXT_KINDS = ("text", "input_text", "output_text")
_KIND = re.compile(r"[A-Za-z0-9_]{1,40}")


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns and tools in the OpenAI form; tool call arguments are objects, never strings."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None


def has_conversation(row: dict[str, Any]) -> bool:
    """Whether a row has turns or a prompt, well formed or not."""
    return any(row.get(key) is not None for key in _TURNS)


def conversation_of(row: dict[str, Any], roles: Mapping[str, str] | None = None) -> Conversation:
    """The conversation in a row: `messages`, ShareGPT `conversations`, or a bare `prompt`.

    A `completion` beside the prompt is its answer. `roles` says what roles of unknown names are,
    by lower-cased name. Raises RowRejected with a reason code.
    """
    known = {**ROLES, **(roles or {})}
    messages = [_message(turn, i, known) for i, turn in enumerate(_turns(row))]
    if not messages:
        raise RowRejected("empty_conversation", "the list of turns is empty")
    system = row.get("system")
    if isinstance(system, str) and system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return Conversation(messages, _tools(row.get("tools")))


def _turns(row: dict[str, Any]) -> list[Any]:
    for key in _TURNS:
        turns = row.get(key)
        if turns is None:
            continue
        if key == "prompt" and isinstance(turns, str):
            turns = [{"role": "user", "content": turns}]
        if not isinstance(turns, list):
            raise RowRejected("bad_conversation", f"`{key}` is a {type(turns).__name__}")
        return [*turns, *_completion(row)] if key == "prompt" else turns
    raise RowRejected(
        "no_conversation",
        "no `messages`, `conversations`, `prompt`, `text` or `input_ids`; the row has "
        f"{', '.join(sorted(row)[:8]) or 'no keys'}",
    )


def _completion(row: dict[str, Any]) -> list[Any]:
    completion = row.get("completion")
    if completion is None:
        return []
    if isinstance(completion, str):
        return [{"role": "assistant", "content": completion}]
    if not isinstance(completion, list):
        raise RowRejected("bad_conversation", f"`completion` is a {type(completion).__name__}")
    return completion


def _message(turn: Any, index: int, roles: Mapping[str, str]) -> Message:
    where = f"turn {index}"
    if not isinstance(turn, dict):
        raise RowRejected("bad_turn", f"{where} is a {type(turn).__name__}, not an object")
    role = _first(turn, "role", "from")
    if not isinstance(role, str) or role.lower() not in roles:
        raise RowRejected("unknown_role", f"{where}: {role!r}; corpus.roles can say what it is")
    message: Message = {
        "role": roles[role.lower()],
        "content": _content(_first(turn, "content", "value"), where),
    }
    calls = turn.get("tool_calls")
    if not calls and turn.get("function_call"):
        # The form that calls had before there could be several in a turn.
        calls = [turn["function_call"]]
    if calls:
        message["tool_calls"] = _tool_calls(calls, where)
    for key in _CARRIED:
        if turn.get(key) is not None:
            message[key] = turn[key]
    return message


def _first(turn: dict[str, Any], *names: str) -> Any:
    """The first of these that has a value: data of two dialects have the keys of both in a row."""
    return next((turn[name] for name in names if turn.get(name) is not None), None)


def _content(content: Any, where: str) -> str:
    """Text of a turn; None, as beside tool calls, is the empty text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join([_part(part, where) for part in content])
    raise RowRejected("unsupported_content", f"{where}: a {type(content).__name__}, not text")


def _part(part: Any, where: str) -> str:
    """Text of one part; another kind is told by its name, so that each is counted apart."""
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("text") if isinstance(part, dict) else None
    if isinstance(text, str) and (kind is None or kind in _TEXT_KINDS):
        return text
    if isinstance(kind, str) and kind not in _TEXT_KINDS and _KIND.fullmatch(kind):
        raise RowRejected(f"content_{kind.lower()}", f"{where}: a part of kind {kind} is no text")
    raise RowRejected("unsupported_content", f"{where}: a part that is no text")


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise RowRejected("bad_tool_calls", f"{where}: tool_calls is a {type(calls).__name__}")
    own: list[dict[str, Any]] = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RowRejected("bad_tool_calls", f"{where}: a call without a function name")
        clean: dict[str, Any] = {
            "type": "function",
            "function": {
                "name": function["name"],
                "arguments": _arguments(function.get("arguments"), where),
            },
        }
        if call.get("id") is not None:
            clean["id"] = call["id"]
        own.append(clean)
    return own


def _arguments(arguments: Any, where: str) -> dict[str, Any]:
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise RowRejected("bad_tool_arguments", f"{where}: {error}") from error
    if not isinstance(arguments, dict):
        raise RowRejected("bad_tool_arguments", f"{where}: not a JSON object")
    return arguments


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    if isinstance(tools, str):
        if not tools.strip():
            return None
        try:
            tools = msgspec.json.decode(tools)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise RowRejected("bad_tools_json", str(error)) from error
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowRejected("bad_tools_json", "tools are not a list of objects")
    return tools
