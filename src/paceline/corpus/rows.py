"""One row into one sample, or into the reason why not."""

from dataclasses import dataclass
from typing import Any

from paceline.corpus.conversation import conversation_of
from paceline.corpus.ids import prompt_id, prompt_turns, sample_id, split_of
from paceline.corpus.mask import Renderer, truncate
from paceline.corpus.rejection import RowRejected
from paceline.corpus.template import Message
from paceline.recipe.schema import CorpusRecipe
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
    """A sample, and whether it was cut to `corpus.max_length`."""

    sample: Sample
    truncated: bool


@dataclass(frozen=True)
class RowPreparer:
    """Turns decoded rows into samples; one per run."""

    renderer: Renderer
    recipe: CorpusRecipe
    regenerate: bool
    """Answers are dropped, because the target will give its own."""

    def prepare(self, row: dict[str, Any], source: str, *, heldout: bool) -> Accepted | Rejected:
        """The sample of a row; of a held-out or regenerated one only the prompt."""
        known: dict[str, str] = {}
        try:
            return self._prepare(row, source, heldout, known)
        except RowRejected as error:
            return Rejected(error.reason, error.detail, **known)
        except RecursionError:
            return Rejected("too_deeply_nested", "tools or arguments inside one another", **known)

    def _prepare(
        self, row: dict[str, Any], source: str, heldout: bool, known: dict[str, str]
    ) -> Accepted:
        conversation = conversation_of(row)
        tools = conversation.tools
        prompt = prompt_turns(conversation.messages)
        if not prompt:
            raise RowRejected("no_user_turn", "there is no prompt to answer")
        prompt_only = heldout or self.regenerate
        messages = prompt if prompt_only else conversation.messages
        known["prompt_id"] = prompt_id(prompt, tools)
        known["sample_id"] = sample_id(messages, tools, self.renderer.identity)
        if not heldout:
            self._check_leading(messages)
        if prompt_only:
            ids, spans, truncated = self._prompt_ids(messages, tools), [], False
        else:
            ids, spans, truncated = self._answered_ids(messages, tools)
        split = (
            Split.HELDOUT
            if heldout
            else split_of(known["prompt_id"], self.recipe.seed, self.recipe.validation_fraction)
        )
        sample = Sample(
            sample_id=known["sample_id"],
            prompt_id=known["prompt_id"],
            source=source,
            split=split,
            messages=messages,
            tools=tools,
            input_ids=ids,
            loss_spans=spans,
        )
        return Accepted(sample, truncated)

    def _check_leading(self, messages: list[Message]) -> None:
        if self.recipe.leading_assistant == "drop" and any(_leading_assistants(messages)):
            raise RowRejected("leading_assistant", "an assistant turn before the first user turn")

    def _prompt_ids(self, messages: list[Message], tools: list[dict[str, Any]] | None) -> list[int]:
        ids = self.renderer.prompt(messages, tools)
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

    def _answered_ids(
        self, messages: list[Message], tools: list[dict[str, Any]] | None
    ) -> tuple[list[int], list[tuple[int, int]], bool]:
        trained = self._trained_turns(messages)
        if not trained:
            raise RowRejected("no_answer", "no assistant turn to train on")
        whole, all_spans = self.renderer.answered(messages, tools, trained)
        ids, spans = truncate(whole, all_spans, self.recipe.max_length)
        if all_spans and not spans:
            raise RowRejected(
                "prompt_exceeds_max_length",
                f"the first trainable token is number {all_spans[0][0]}, "
                f"max_length is {self.recipe.max_length}",
            )
        trainable = sum(end - start for start, end in spans)
        if trainable < self.recipe.min_loss_tokens:
            raise RowRejected(
                "too_few_loss_tokens", f"{trainable} of at least {self.recipe.min_loss_tokens}"
            )
        return ids, spans, len(whole) > len(ids)

    def _trained_turns(self, messages: list[Message]) -> list[int]:
        leading = _leading_assistants(messages)
        trained = [
            i
            for i, message in enumerate(messages)
            if message["role"] == "assistant"
            and (self.recipe.leading_assistant == "keep" or not leading[i])
        ]
        return trained[-1:] if self.recipe.last_turn_only else trained


def _leading_assistants(messages: list[Message]) -> list[bool]:
    """Per turn: an assistant's, before the first user turn."""
    first_user = next((i for i, m in enumerate(messages) if m["role"] == "user"), len(messages))
    return [m["role"] == "assistant" and i < first_user for i, m in enumerate(messages)]
