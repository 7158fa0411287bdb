"""One row into its samples, or into the reason why not."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from paceline.corpus.given_tokens import tokens_of
from paceline.corpus.loops import is_loop
from paceline.corpus.mask import Event, Renderer, Spans, Tools, truncate
from paceline.corpus.policies import (
    has_consecutive_roles,
    leading_assistants,
    with_roles_apart,
)
from paceline.recipe.schema import CorpusRecipe
from paceline.rows.conversation import Conversation, Message, conversation_of, has_conversation
from paceline.rows.ids import (
    given_prompt_id,
    given_sample_id,
    prompt_id,
    prompt_turns,
    sample_id,
    split_of,
)
from paceline.rows.rejection import RowRejected
from paceline.types import Sample, Split


@dataclass(frozen=True, slots=True)
class Rejected:
    """A row left out, with the ids it has so far."""

    reason: str
    detail: str
    sample_id: str | None = None
    prompt_id: str | None = None


@dataclass(frozen=True, slots=True)
class Accepted:
    """The samples of a row: one for each generation event of its conversation, one for most."""

    samples: tuple[Sample, ...]
    """At least one; that of most turns last."""
    notes: Counter[str] = field(default_factory=Counter)
    """What the recipe's policies did to the row, by name, each with how often."""

    @property
    def sample(self) -> Sample:
        """That of most turns."""
        return self.samples[-1]

    @property
    def truncated(self) -> bool:
        """Whether a sample was cut to `corpus.max_length`."""
        return self.notes["cut_to_max_length"] > 0


@dataclass(frozen=True)
class RowPreparer:
    """Turns decoded rows into samples; one per process."""

    renderer: Renderer
    recipe: CorpusRecipe
    regenerate: bool
    """Answers are dropped, because the target will give its own."""

    def prepare(self, row: dict[str, Any], source: str, *, heldout: bool) -> Accepted | Rejected:
        """The samples of a row; of a held-out or regenerated one only the prompt."""
        known: dict[str, str] = {}
        try:
            return self._prepare(row, _Use(source, heldout), known)
        except RowRejected as error:
            return Rejected(error.reason, error.detail, **known)
        except RecursionError:
            return Rejected("too_deeply_nested", "tools or arguments inside one another", **known)

    def _prepare(self, row: dict[str, Any], use: "_Use", known: dict[str, str]) -> Accepted:
        if row.get("input_ids") is not None:
            return self._given_tokens(row, use, known)
        text = row.get("text")
        if isinstance(text, str) and not has_conversation(row):
            if not (use.heldout or self.regenerate):
                return self._plain_text(text, use, known)
            row = {"prompt": text}
        return self._conversation(conversation_of(row, self._roles), use, known)

    @cached_property
    def _roles(self) -> dict[str, str]:
        return {name.lower(): role for name, role in self.recipe.roles.items()}

    def _conversation(
        self, conversation: Conversation, use: "_Use", known: dict[str, str]
    ) -> Accepted:
        tools = conversation.tools
        messages = with_roles_apart(conversation.messages, self.recipe.consecutive_roles)
        notes = Counter[str]()
        if has_consecutive_roles(conversation.messages):
            notes[f"consecutive_roles_{self.recipe.consecutive_roles}"] += 1
        prompt = prompt_turns(messages)
        if not prompt:
            raise RowRejected("no_user_turn", "there is no prompt to answer")
        prompt_only = use.heldout or self.regenerate
        messages = prompt if prompt_only else messages
        known["prompt_id"] = prompt_id(prompt, tools)
        known["sample_id"] = sample_id(messages, tools, self.renderer.identity)
        if not use.heldout and any(leading_assistants(messages)):
            if self.recipe.leading_assistant == "drop":
                raise RowRejected(
                    "leading_assistant", "an assistant turn before the first user turn"
                )
            notes[f"leading_assistant_{self.recipe.leading_assistant}"] += 1
        if tools and not self.renderer.shows_tools(prompt, tools):
            notes["tools_not_rendered"] += 1
        split = self._split(known["prompt_id"], use)
        if prompt_only:
            ids = self._prompt_ids(self.renderer.prompt(messages, tools))
            sample = use.sample(known, split, ids, [], messages=messages, tools=tools)
            return Accepted((sample,), notes)
        events = self._events(messages, tools, notes)
        # Of one conversation all samples share a split, so no part of it is validated on another.
        samples = tuple(
            use.sample(
                self._event_ids(messages, tools, event, known),
                split, event.ids, event.spans, messages=messages[: event.end], tools=tools,
            )
            for event in events
        )  # fmt: skip
        return Accepted(samples, notes)

    def _event_ids(
        self, messages: list[Message], tools: Tools, event: Event, known: dict[str, str]
    ) -> dict[str, str]:
        if event.end == len(messages):
            return known
        turns = messages[: event.end]
        return {
            "prompt_id": prompt_id(prompt_turns(turns), tools),
            "sample_id": sample_id(turns, tools, self.renderer.identity),
        }

    def _events(self, messages: list[Message], tools: Tools, notes: Counter[str]) -> list[Event]:
        """Those that can be trained on; if there is none, the reason of the last one is raised."""
        trained = self._trained_turns(messages)
        if not trained:
            raise RowRejected("no_answer", "no assistant turn to train on")
        kept: list[Event] = []
        refused: RowRejected | None = None
        for event in self.renderer.events(messages, tools, trained):
            try:
                ids, spans = self._usable(event.ids, event.spans, notes)
            except RowRejected as error:
                refused = error
                notes[f"answers_left_out_{error.reason}"] += 1
                continue
            kept.append(Event(ids, spans, event.end))
            if event.left_out:
                notes["reasoning_not_rendered"] += event.left_out
        if refused is not None and not kept:
            raise refused
        return kept

    def _usable(self, ids: list[int], spans: Spans, notes: Counter[str]) -> tuple[list[int], Spans]:
        """Cut to `corpus.max_length`. Raises RowRejected where too little is left."""
        cut, left = truncate(ids, spans, self.recipe.max_length)
        if spans and not left:
            raise RowRejected(
                "prompt_exceeds_max_length",
                f"the first trainable token is number {spans[0][0]}, "
                f"max_length is {self.recipe.max_length}",
            )
        if len(cut) < len(ids) and self.recipe.on_length == "exclude":
            raise RowRejected(
                "exceeds_max_length", f"{len(ids)} tokens of at most {self.recipe.max_length}"
            )
        trainable = sum(end - start for start, end in left)
        if trainable < self.recipe.min_loss_tokens:
            raise RowRejected(
                "too_few_loss_tokens", f"{trainable} of at least {self.recipe.min_loss_tokens}"
            )
        if any(is_loop(cut[start:end], self.recipe.loop_repeats) for start, end in left):
            if self.recipe.on_loop == "exclude":
                raise RowRejected(
                    "loop", f"an answer repeats 8 tokens {self.recipe.loop_repeats} times"
                )
            notes["loops_keep"] += 1
        notes["cut_to_max_length"] += len(cut) < len(ids)
        return cut, left

    def _plain_text(self, text: str, use: "_Use", known: dict[str, str]) -> Accepted:
        """A text without turns: all is trained on but the token that nothing comes before."""
        if not text.strip():
            raise RowRejected("empty_text", "the text has no words")
        given = ["text", text]
        known["prompt_id"] = given_prompt_id(given)
        known["sample_id"] = given_sample_id(given, self.renderer.identity)
        ids = list(self.renderer.tokenizer.encode(text, verbose=False))
        notes = Counter[str]()
        ids, spans = self._usable(ids, [(1, len(ids))] if len(ids) > 1 else [], notes)
        split = self._split(known["prompt_id"], use)
        return Accepted((use.sample(known, split, ids, spans),), notes)

    def _given_tokens(self, row: dict[str, Any], use: "_Use", known: dict[str, str]) -> Accepted:
        ids, spans = tokens_of(row, len(self.renderer.tokenizer))
        prompt = ids[: spans[-1][0]] if spans else ids
        known["prompt_id"] = given_prompt_id(["tokens", prompt])
        split = self._split(known["prompt_id"], use)
        notes = Counter[str]()
        if use.heldout or self.regenerate:
            if not prompt:
                raise RowRejected("no_user_turn", "all tokens are trained on: there is no prompt")
            ids, spans = self._prompt_ids(prompt), []
        else:
            ids, spans = self._usable(ids, spans, notes)
        known["sample_id"] = given_sample_id(["tokens", ids, spans], self.renderer.identity)
        return Accepted((use.sample(known, split, ids, spans),), notes)

    def _split(self, prompt: str, use: "_Use") -> Split:
        if use.heldout:
            return Split.HELDOUT
        return split_of(prompt, self.recipe.seed, self.recipe.validation_fraction)

    def _prompt_ids(self, ids: list[int]) -> list[int]:
        if len(ids) >= self.recipe.max_length:
            raise RowRejected(
                "prompt_exceeds_max_length",
                f"{len(ids)} tokens leave no room for an answer in {self.recipe.max_length}",
            )
        longest = self.recipe.max_prompt_length
        if longest is not None and len(ids) > longest:
            raise RowRejected(
                "prompt_exceeds_max_prompt_length", f"{len(ids)} tokens of at most {longest}"
            )
        return ids

    def _trained_turns(self, messages: list[Message]) -> list[int]:
        leading = leading_assistants(messages)
        trained = [
            i
            for i, message in enumerate(messages)
            if message["role"] == "assistant"
            and (self.recipe.leading_assistant == "keep" or not leading[i])
        ]
        return trained[-1:] if self.recipe.last_turn_only else trained


@dataclass(frozen=True, slots=True)
class _Use:
    """What a row's samples are for."""

    source: str
    heldout: bool

    def sample(
        self,
        known: dict[str, str],
        split: Split,
        ids: list[int],
        spans: Spans,
        *,
        messages: Sequence[Message] = (),
        tools: Tools = None,
    ) -> Sample:
        return Sample(
            sample_id=known["sample_id"],
            prompt_id=known["prompt_id"],
            source=self.source,
            split=split,
            messages=list(messages),
            tools=tools,
            input_ids=ids,
            loss_spans=spans,
        )
