"""`paceline regenerate` with `regenerate.servers`: every prompt to whichever server is free."""

import asyncio
import hashlib
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import msgspec

from paceline.corpus.answer import answer_room
from paceline.corpus.answer_reasons import FAILED, REJECTED
from paceline.corpus.groups import Line, located, read_prompt
from paceline.corpus.regenerate_tally import Progress
from paceline.corpus.served.reading import Reader
from paceline.corpus.served.store import Kept, Refused, ServedStore
from paceline.durable.errors import DataError, RecipeChanged, UserError
from paceline.flow.signals import signals_noted
from paceline.recipe.schema import Recipe
from paceline.target.served.client import Client, Question
from paceline.target.served.endpoint import Endpoint
from paceline.target.served.pace import Pace
from paceline.target.served.pool import Pool
from paceline.target.served.replies import Reply
from paceline.target.served.trial import Taken
from paceline.types import Sample, Split
from paceline.watch.events import Counts, EventWriter

_EVENT_SECONDS = 1.0
_SEED_BITS = 0x7FFFFFFF
"""Servers keep seeds in 32 bits, some of them signed."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Told:
    """What the servers did, for the report."""

    progress: Progress
    endpoints: tuple[Endpoint, ...]
    model: str
    retokenised: int
    unchecked: int

    def counts(self) -> Counts:
        """For events."""
        return self.progress.counts()

    def numbers(self) -> dict[str, Any]:
        """JSON values."""
        served = {
            "model": self.model,
            "endpoints": [endpoint.numbers() for endpoint in self.endpoints],
            "retokenised": self.retokenised,
            "unchecked_prompts": self.unchecked,
        }
        return {**self.progress.numbers(), "served": served}

    def lines(self) -> Iterator[str]:
        """For the terminal."""
        yield from self.progress.lines()
        for endpoint in self.endpoints:
            yield endpoint.line()
        if self.retokenised:
            yield (
                f"{self.retokenised} answers came as text and were tokenised here: the target may "
                "have chosen other tokens for it. A server that knows `return_token_ids` tells them"
            )
        if self.unchecked:
            yield (
                f"{self.unchecked} answers came without a word on the prompt that the server had "
                "processed: whether it is ours could not be checked"
            )


def ask_servers(
    recipe: Recipe,
    prepared: Path,
    reader: Reader,
    store: ServedStore,
    progress: Progress,
    events: EventWriter,
    *,
    max_length: int,
    pace: Pace | None = None,
) -> Told:
    """Have every prompt of the corpus answered, rejected, or given up; `store` then has it all.

    `progress` knows what the store had found. Raises Interrupted on SIGTERM or SIGINT, with what
    has been answered kept; UserError where no server is of use, or the servers call the target
    otherwise than in the first run; ServersFailed where none answers for long.
    """
    todo = _todo(prepared, store, max_length)
    work = _Work(
        recipe=recipe,
        prepared=prepared,
        reader=reader,
        store=store,
        progress=progress,
        events=events,
        max_length=max_length,
        has_useful=progress.done > progress.refused.total(),
    )
    events.emit("start", progress.counts(), to_ask=len(todo))
    if progress.done:
        useless = "".join(f", {n} of them {reason}" for reason, n in progress.refused.most_common())
        _log.info(
            "%d prompts were dealt with before%s; %d are left", progress.done, useless, len(todo)
        )
    if todo:
        with signals_noted("the answers under way, or some seconds") as stop:
            try:
                asyncio.run(work.run(todo, pace or Pace(), lambda: stop.asked))
            finally:
                work.tell()
            if stop.asked:
                raise stop.interrupted(
                    f"stopped after {work.done:,} of the {len(todo):,} prompts that were left"
                )
    return Told(
        progress=progress,
        endpoints=work.endpoints,
        model=store.model or "",
        retokenised=store.flags["retokenised"],
        unchecked=store.flags["unchecked"],
    )


def request_seed(seed: int, prompt_id: str) -> int:
    """The seed of a prompt's request: whatever the order, it is the same."""
    digest = hashlib.sha256(f"answer:{seed}:{prompt_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") & _SEED_BITS


def _key(variable: str) -> str:
    """The servers' key; empty where they want none. Raises UserError for what can be none."""
    key = os.environ.get(variable, "").strip() if variable else ""
    if not key.isprintable():
        raise UserError(
            f"the variable {variable} of the environment holds control characters, a line feed "
            "perhaps, which no key has. Set it anew (regenerate.api_key_variable)."
        )
    return key


def question_of(recipe: Recipe, prompt: Sample, limit: int) -> Question:
    """The request for an answer of at most `limit` tokens."""
    asked = recipe.regenerate
    fields: dict[str, Any] = {
        "max_tokens": limit,
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "seed": request_seed(asked.seed, prompt.prompt_id),
        "return_token_ids": True,
        **asked.server_options,
    }
    if asked.api == "completions":
        return Question(prompt.prompt_id, "/completions", {"prompt": prompt.input_ids, **fields})
    if prompt.tools:
        fields["tools"] = prompt.tools
    if recipe.corpus.template_args:
        fields["chat_template_kwargs"] = recipe.corpus.template_args
    if not prompt.messages:
        raise DataError(
            f"sample {prompt.sample_id} of {prompt.source} came as tokens, and has no turns for a "
            "chat server. Set regenerate.api to completions."
        )
    messages = [_message(message) for message in prompt.messages]
    return Question(prompt.prompt_id, "/chat/completions", {"messages": messages, **fields})


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """As the API wants it: the arguments of a call are JSON in a text."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    texts = [
        {**call, "function": {**call["function"], "arguments": _json(call["function"])}}
        for call in calls
    ]
    return {**message, "tool_calls": texts}


def _json(function: dict[str, Any]) -> str:
    return msgspec.json.encode(function["arguments"]).decode()


def _todo(prepared: Path, store: ServedStore, max_length: int) -> list[Line]:
    """The prompts that are to be asked for, by their places in the corpus."""
    places: list[Line] = []
    for line, sample in located(prepared):
        if sample.split is not Split.HELDOUT and not store.has(sample.prompt_id):
            answer_room(sample, max_length)
            places.append(line)
    return places


@dataclass(kw_only=True)
class _Work:
    """One pass over the prompts that are left; the `Results` of the pool."""

    recipe: Recipe
    prepared: Path
    reader: Reader
    store: ServedStore
    progress: Progress
    events: EventWriter
    max_length: int
    has_useful: bool
    """Whether earlier runs have an answer that is one."""
    endpoints: tuple[Endpoint, ...] = ()
    done: int = 0
    _asked: dict[str, tuple[Sample, int]] = field(default_factory=dict)
    """Prompts in flight, or waiting for another try, with the tokens an answer may have."""
    _told: tuple[float, int] = (-math.inf, 0)
    """When progress was told last, and of how many."""

    async def run(self, places: Iterable[Line], pace: Pace, is_stopped: Callable[[], bool]) -> None:
        """Ask until all is done or stopped."""
        asked, random = self.recipe.regenerate, Random()
        key = _key(asked.api_key_variable)
        connector = aiohttp.TCPConnector(limit=0)
        session = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
        async with session:
            self.endpoints = tuple(
                Endpoint(
                    Client(session, url.rstrip("/"), asked.timeout, key),
                    asked.concurrency,
                    pace,
                    random,
                )
                for url in asked.servers
            )
            pool = Pool(
                list(self.endpoints),
                self,
                model=asked.model,
                attempts=asked.attempts,
                server_wait=asked.server_wait,
                pace=pace,
                random=random,
            )
            await pool.run(self._questions(places), is_stopped=is_stopped, on_glance=self._glance)

    def _questions(self, places: Iterable[Line]) -> Iterator[Question]:
        with self.prepared.open("rb") as corpus:
            for place in places:
                prompt = read_prompt(corpus, place)
                room = answer_room(prompt, self.max_length)
                limit = min(self.recipe.regenerate.max_new_tokens, room)
                self._asked[prompt.prompt_id] = (prompt, limit)
                question = question_of(self.recipe, prompt, limit)
                # Where nothing of use is here yet, the same once more does speak of the server.
                is_repeated = self.has_useful and self.store.is_repeated(prompt.prompt_id)
                yield replace(question, is_repeated=is_repeated)

    def named(self, model: str, url: str) -> None:
        """Remember what the servers call the target; refuse another name than the first run's."""
        if self.store.model is None:
            self.store.name_model(model)
        elif self.store.model != model:
            raise RecipeChanged(
                f"{url} serves {model}, and the answers that are here are by {self.store.model}. "
                "Use a new run directory (`--run DIR`), or serve that again (regenerate.model)."
            )

    def read(self, question: Question, reply: Reply) -> Taken:
        """What to keep of a reply."""
        prompt, limit = self._asked[question.key]
        kept = self.reader.read(prompt, limit, reply)
        return Taken(kept, len(kept.said.ids), *self.reader.fault(kept))

    async def keep(self, question: Question, answer: Kept) -> None:
        """Keep an answer, or why it is none."""
        await self._keep(question, answer)

    async def reject(self, question: Question, message: str) -> None:
        """A prompt that a server refuses."""
        await self._keep(question, _refused(question, REJECTED, message))

    async def give_up(self, question: Question, message: str) -> None:
        """A prompt over which requests fail."""
        _log.warning("prompt %s is given up: %s", question.key, message)
        await self._keep(question, _refused(question, FAILED, message))

    async def _keep(self, question: Question, kept: Kept) -> None:
        await self.store.keep(kept)
        del self._asked[question.key]
        self.done += 1
        count(self.progress, kept)

    def _glance(self) -> None:
        now = time.monotonic()
        if self.done > self._told[1] and now - self._told[0] >= _EVENT_SECONDS:
            self.tell()

    def tell(self) -> None:
        """An event with what is done by now."""
        self._told = (time.monotonic(), self.done)
        self.events.emit(
            "progress",
            self.progress.counts(),
            finish=self.progress.finish,
            endpoints=[endpoint.numbers() for endpoint in self.endpoints],
        )
        self.progress.log()


def count(progress: Progress, kept: Kept) -> None:
    """Count what is done in this run."""
    if isinstance(kept.said, Refused):
        progress.refuse(kept.said.reason)
    else:
        progress.add([kept.said])


def count_found(progress: Progress, kept: Kept, times: int) -> None:
    """Count what an earlier run has done, or (-1) undo that."""
    if isinstance(kept.said, Refused):
        progress.reuse_refusal(kept.said.reason, times)
    else:
        progress.reuse([kept.said], times)


def _refused(question: Question, reason: str, message: str) -> Kept:
    return Kept(Refused(prompt_id=question.key, reason=reason, detail=message))
