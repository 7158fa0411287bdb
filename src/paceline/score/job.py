"""What a scoring worker is handed: the job, and the prompts one by one; picklable."""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.decode.propose import Drafting
from paceline.decode.sampling import GREEDY, Sampling
from paceline.recipe.schema import TargetRecipe
from paceline.rows.conversation import Message


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt, of one turn or several."""

    prompt_id: str
    dataset: str
    domain: str = ""
    """As in `PromptResult`; so is `language`."""
    language: str = ""
    input_ids: tuple[int, ...]
    """The context of the first turn."""
    messages: tuple[Message, ...] = ()
    """The same as turns; empty where the corpus holds tokens alone."""
    later: tuple[str, ...] = ()
    """User turns that follow, each after the target's own answer to the one before."""
    tools: list[dict[str, Any]] | None = None
    is_in_corpus: bool = True
    check_walk: bool
    """Whether the walk's budgets are decoded here too."""

    def __repr__(self) -> str:
        return f"prompt {self.prompt_id} of {self.dataset}"

    @property
    def turns(self) -> tuple[Message, ...]:
        """All that is asked: `messages`, and the later turns without the answers between."""
        return (*self.messages, *({"role": "user", "content": text} for text in self.later))

    @property
    def text(self) -> str:
        """What the user says, in all turns; empty where only tokens are known."""
        return "\n".join(str(m["content"]) for m in self.turns if m["role"] == "user")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is the same for all prompts."""

    target: TargetRecipe
    drafter: Path
    max_new_tokens: int
    budgets: tuple[int, ...]
    walk_budgets: tuple[int, ...]
    samplings: tuple[Sampling, ...] = (GREEDY,)
    drafting: tuple[Drafting, ...] = ()
    """Beside greedy drafting, of chains at temperatures above 0."""
    seed: int = 0
    """Of what is drawn."""
    warmup: tuple[Prompt, ...] = ()
    """Decoded before the first prompt, a few tokens of each, and not counted."""
    template_args: dict[str, Any] = field(default_factory=dict)
    """As in `corpus.template_args`; `template_file` likewise. Later turns are rendered with it."""
    template_file: str | None = None


def lot(seed: int, prompt_id: str) -> bytes:
    """What a prompt draws where the prompts of the lowest are taken."""
    return hashlib.sha256(f"{seed}/{prompt_id}".encode()).digest()
