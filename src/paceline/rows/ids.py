"""Content-addressed names: the same row has the same id in any order, file, run or machine."""

import hashlib
from typing import Any

import msgspec

from paceline.types import Split


def _digest(value: Any) -> str:
    canonical = msgspec.json.encode(value, order="deterministic")
    return hashlib.sha256(canonical).hexdigest()[:32]


def sample_id(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, identity: str
) -> str:
    """32 hex digits over turns, tools and `rendering_identity`."""
    return _digest(["sample", messages, tools, identity])


def prompt_id(prompt: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
    """32 hex digits over the prompt's turns (`prompt_turns`) and tools; no answer changes it."""
    return _digest(["prompt", prompt, tools])


def given_sample_id(given: list[Any], identity: str) -> str:
    """32 hex digits over a row without turns, its kind first, and `rendering_identity`."""
    return _digest(["sample", *given, identity])


def given_prompt_id(given: list[Any]) -> str:
    """32 hex digits over what stands for the prompt of a row without turns, its kind first."""
    return _digest(["prompt", *given])


def prompt_turns(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The turns up to and including the last user turn; empty where no user speaks."""
    last = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
    return messages[: last + 1]


def split_of(prompt: str, seed: int, validation_fraction: float) -> Split:
    """TRAIN or VALIDATION from the prompt's id alone, so other rows never move a prompt."""
    draw = int.from_bytes(hashlib.sha256(f"split:{seed}:{prompt}".encode()).digest()[:8], "big")
    return Split.VALIDATION if draw / 2**64 < validation_fraction else Split.TRAIN
