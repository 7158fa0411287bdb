"""The prompts of `score.datasets`: read, chosen as the convention does, and rendered."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.durable.errors import DataError
from paceline.recipe.schema import Recipe, ScoreSetRecipe
from paceline.recipe.score_inputs import ScoreSettings, score_settings, set_name
from paceline.rows.conversation import Message
from paceline.rows.formats import read_rows
from paceline.rows.ids import prompt_id
from paceline.rows.rejection import RowRejected
from paceline.score.adapters import Question, question_of
from paceline.score.job import Prompt, lot
from paceline.target.chat import check_template_args, encode, load_tokenizer, render_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LOG = logging.getLogger(__name__)

_SLACK = 32
"""Tokens by which an answer may grow when its text is tokenised again inside the next prompt."""


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """A question, where it stands, and its id."""

    question: Question
    prompt_id: str
    where: str


def dataset_prompts(recipe: Recipe, *, room: int) -> list[Prompt]:
    """The prompts of all `score.datasets`, in order; those without room are left out, and told.

    `room` is what the target's positions leave for a prompt. Raises DataError that names file and
    row for a row that its adapter cannot read, and where a data set has no prompt that fits;
    TargetError as `load_tokenizer`.
    """
    check_template_args(recipe.corpus.template_args)
    tokenizer = load_tokenizer(recipe.target.path, recipe.corpus.template_file)
    settings = score_settings(recipe.score)
    prompts: list[Prompt] = []
    seen: set[str] = set()
    for asked in recipe.score.datasets:
        found = _take(_read(asked, settings), asked, settings)
        fitting = [
            prompt
            for one in found
            if one.prompt_id not in seen
            and (prompt := _prompt(one, set_name(asked), recipe, tokenizer, room, settings))
        ]
        twice = sum(one.prompt_id in seen for one in found)
        if len(fitting) < len(found):
            _LOG.warning(
                "%s: %d of %d prompts are left out: %d of another data set too, the others longer "
                "than the %d tokens that the target has room for beside its answers",
                set_name(asked), len(found) - len(fitting), len(found), twice, room,
            )  # fmt: skip
        if not fitting:
            raise DataError(
                f"{asked.path}: none of its {len(found)} prompts can be scored: the target has "
                f"room for {max(room, 0)} tokens beside score.max_new_tokens "
                f"{settings.max_new_tokens} and a block. Lower it, or give shorter ones."
            )
        seen.update(prompt.prompt_id for prompt in fitting)
        prompts += fitting
    return prompts


def later_prompt(
    tokenizer: "PreTrainedTokenizerBase",
    template_args: dict[str, Any],
    prompt: Prompt,
    answers: Sequence[str],
) -> tuple[int, ...]:
    """Token ids of the context of turn `len(answers)`, the target's answers before it included."""
    messages = list(prompt.messages)
    for answer, text in zip(answers, prompt.later, strict=False):
        messages.append({"role": "assistant", "content": answer})
        messages.append({"role": "user", "content": text})
    return _ids(tokenizer, template_args, messages, prompt.tools)


def _read(asked: ScoreSetRecipe, settings: ScoreSettings) -> list[_Asked]:
    """Every question, equal ones once. Raises DataError."""
    asks = settings.convention.wording == "asks"
    found: dict[str, _Asked] = {}
    for row in read_rows(asked.path):
        if row.is_blank:
            continue
        where = f"{row.file}, row {row.line}"
        if row.value is None:
            raise DataError(f"{where}: {row.fault}. Mend the row, or take it out.")
        try:
            question = question_of(row.value, asked.adapter, asks=asks)
        except RowRejected as error:
            raise DataError(
                f"{where}: not a row of {asked.adapter} ({error.detail}). Mend it, or give "
                "another `adapter` for this data set."
            ) from error
        if settings.convention.is_first_turn_only and question.later:
            question = Question(messages=question.messages, domain=question.domain)
        turns: list[Message] = [*question.messages]
        turns += [{"role": "user", "content": text} for text in question.later]
        named = prompt_id(turns, question.tools)
        found.setdefault(named, _Asked(question=question, prompt_id=named, where=where))
    if not found:
        raise DataError(f"{asked.path}: no rows. Check score.datasets in the recipe.")
    return list(found.values())


def _take(
    found: Sequence[_Asked], asked: ScoreSetRecipe, settings: ScoreSettings
) -> Sequence[_Asked]:
    limit, seed = settings.limit_of(asked), settings.seed
    match settings.convention.take:
        case "hash":
            return sorted(found, key=lambda one: lot(seed, one.prompt_id))[:limit]
        case "shuffle" if limit is not None and limit < len(found):
            # The permutation that `datasets.Dataset.shuffle(seed)` makes.
            order = np.random.default_rng(seed).permutation(len(found))
            return [found[place] for place in order[:limit]]
        case _:
            return found[:limit]


def _prompt(
    one: _Asked,
    dataset: str,
    recipe: Recipe,
    tokenizer: "PreTrainedTokenizerBase",
    room: int,
    settings: ScoreSettings,
) -> Prompt | None:
    """None where the target has no room for the last turn after answers of full length."""
    question, args = one.question, recipe.corpus.template_args
    messages = list(question.messages)
    try:
        ids = _ids(tokenizer, args, messages, question.tools)
        prompt = Prompt(
            prompt_id=one.prompt_id,
            dataset=dataset,
            domain=question.domain or dataset,
            input_ids=ids,
            messages=question.messages,
            later=question.later,
            tools=question.tools,
            is_in_corpus=False,
            check_walk=False,
        )
        longest = len(later_prompt(tokenizer, args, prompt, [""] * len(question.later)))
    except RowRejected as error:
        raise DataError(
            f"{one.where}: the target's chat template cannot render it ({error.detail})."
        ) from error
    longest += len(question.later) * (settings.max_new_tokens + _SLACK)
    return prompt if longest <= room else None


def _ids(
    tokenizer: "PreTrainedTokenizerBase",
    template_args: dict[str, Any],
    messages: list[Message],
    tools: list[dict[str, Any]] | None,
) -> tuple[int, ...]:
    text = render_text(tokenizer, messages, tools, template_args, generation_prompt=True)
    return tuple(encode(tokenizer, text))
