"""What the recipe says of conversations that are not as they should be."""

from itertools import pairwise
from typing import Literal

from paceline.rows.conversation import Message
from paceline.rows.rejection import RowRejected

_PLAIN = {"role", "content"}


def leading_assistants(messages: list[Message]) -> list[bool]:
    """Per turn: an assistant's, before the first user turn."""
    first_user = next((i for i, m in enumerate(messages) if m["role"] == "user"), len(messages))
    return [m["role"] == "assistant" and i < first_user for i, m in enumerate(messages)]


def has_consecutive_roles(messages: list[Message]) -> bool:
    """Whether two turns in a row have one role; results of tools may."""
    roles = [message["role"] for message in messages]
    return any(a == b != "tool" for a, b in pairwise(roles))


def with_roles_apart(
    messages: list[Message], policy: Literal["keep", "merge", "exclude"]
) -> list[Message]:
    """The turns as `corpus.consecutive_roles` wants them.

    Raises RowRejected (`consecutive_roles`) where it wants no such row, and where one of the turns
    to be joined has more than text, which no rule could join.
    """
    if policy == "keep" or not has_consecutive_roles(messages):
        return messages
    if policy == "exclude":
        raise RowRejected("consecutive_roles", "two turns in a row have one role")
    merged: list[Message] = []
    for message in messages:
        if not merged or merged[-1]["role"] != message["role"] or message["role"] == "tool":
            merged.append(message)
            continue
        if not (merged[-1].keys() | message.keys()) <= _PLAIN:
            raise RowRejected(
                "consecutive_roles", "turns with tool calls or reasoning cannot be joined"
            )
        texts = [merged[-1]["content"], message["content"]]
        merged[-1] = {**message, "content": "\n\n".join(text for text in texts if text)}
    return merged
