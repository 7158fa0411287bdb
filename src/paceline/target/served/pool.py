"""Several endpoints and many prompts: each prompt goes to whichever endpoint is free.

Who has to wait, who is asked again and what is given up is decided in one loop; requests are tasks
beside it. A prompt that is answered, rejected or given up leaves the pool once that is durable, so
there are never more answers in memory than requests may be in flight.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

from paceline.durable.errors import ServersFailed, UserError
from paceline.target.served.client import Question
from paceline.target.served.endpoint import Endpoint, Streak
from paceline.target.served.pace import Pace, grown
from paceline.target.served.replies import Failed, Rejected, Reply, Unusable
from paceline.target.served.trial import Held, Taken, Trial
from paceline.watch.words import duration

_log = logging.getLogger(__name__)

_WHOLE = 4
"""A failure that the prompt may have caused; one that it hardly has counts a quarter of it."""


class BadReply(Exception):
    """An answer that cannot be one: another try may help."""


class WrongPrompt(Exception):
    """The server processes other prompts than those it is sent: no answer of it is any use."""


class Results(Protocol):
    """Where answers go. What `keep`, `reject` and `give_up` are told is durable on their return."""

    def named(self, model: str, url: str) -> None:
        """The servers call the target so; before the first prompt. Raises UserError."""
        ...

    def read(self, question: Question, reply: Reply) -> Taken:
        """What to make of an answer. Raises BadReply, WrongPrompt."""
        ...

    async def keep(self, question: Question, answer: Any) -> None:
        """Keep what `read` has made."""
        ...

    async def reject(self, question: Question, message: str) -> None:
        """A server refuses the prompt itself."""
        ...

    async def give_up(self, question: Question, message: str) -> None:
        """The prompt has failed too often."""
        ...


@dataclass(eq=False, slots=True)
class _Failure:
    streak: Streak
    weight: int
    is_proven: bool = False
    """The endpoint was seen to be there right after it."""


@dataclass(eq=False, slots=True)
class _Job:
    question: Question
    failures: list[_Failure] = field(default_factory=list)
    last: Endpoint | None = None
    said: str = ""
    """What the last failure was."""
    due: float = 0.0

    def counted(self) -> int:
        """Failures that speak against the prompt, in quarters."""
        counts = 0
        for failure in self.failures:
            if failure.is_proven or failure.streak.is_of_prompts:
                counts += failure.weight
            elif failure.streak.is_down:
                counts += min(failure.weight, 1)
        return counts


class Pool:
    """Puts questions to endpoints until each has an answer, a rejection, or too many failures."""

    def __init__(
        self,
        endpoints: list[Endpoint],
        results: Results,
        *,
        model: str,
        attempts: int,
        server_wait: float,
        pace: Pace,
        random: Random,
    ) -> None:
        """`model` is what the servers call the target; empty takes the only one that they list."""
        self.endpoints = endpoints
        self._results = results
        self._asked_model = self._model = model
        self._is_named = False
        self._attempts = attempts
        self._server_wait = server_wait
        self._pace = pace
        self._random = random
        self._fresh: Iterator[Question] = iter(())
        self._has_fresh = True
        self._again: list[_Job] = []
        self._untried = 0
        self._trials = {endpoint: Trial() for endpoint in endpoints}
        self._tasks: set[asyncio.Task[None]] = set()
        self._error: BaseException | None = None
        self._wake = asyncio.Event()

    async def run(
        self,
        questions: Iterable[Question],
        *,
        is_stopped: Callable[[], bool],
        on_glance: Callable[[], None],
    ) -> None:
        """Returns when all is done, or some seconds after `is_stopped()`, with nothing in flight.

        Raises UserError where no endpoint is of use, ServersFailed where none answers for
        `server_wait` seconds, and whatever `results` or `questions` raise.
        """
        self._fresh = iter(questions)
        stop_at: float | None = None
        try:
            while True:
                if self._error is not None:
                    raise self._error
                now = time.monotonic()
                on_glance()
                if is_stopped():
                    stop_at = stop_at or now + self._pace.grace
                    if not self._tasks or now >= stop_at:
                        return
                else:
                    self._start_checks(now)
                    self._start_asking(now)
                    if await self._is_done():
                        return
                    self._require_endpoints(now)
                self._wake.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), self._pace.glance)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._error = self._error or task.exception()
        self._wake.set()

    async def _is_done(self) -> bool:
        if self._has_fresh or self._again or self._tasks:
            return False
        # No answer tells any more whether the requests or the prompts are wrong.
        for trial in self._trials.values():
            await self._release(trial)
        return True

    def _require_endpoints(self, now: float) -> None:
        left = [endpoint for endpoint in self.endpoints if endpoint.state != "out"]
        if not left:
            raise UserError(
                f"none of the servers can be used:\n{self._sayings()}\nMend them or the recipe "
                "(regenerate.servers, model, server_options). What was answered is kept."
            )
        since = [endpoint.silent_since for endpoint in left if endpoint.silent_since is not None]
        if len(since) == len(left) and now - max(since) >= self._server_wait:
            raise ServersFailed(
                f"no server has answered for {duration(now - max(since))} "
                f"(regenerate.server_wait):\n{self._sayings()}\n"
                "What was answered is kept: the same command goes on from there."
            )

    def _sayings(self) -> str:
        return "\n".join(f"  {endpoint.url}: {endpoint.said}" for endpoint in self.endpoints)

    def _start_checks(self, now: float) -> None:
        for endpoint in self.endpoints:
            if endpoint.needs_check(now):
                endpoint.state = "checking"
                self._begin(self._check(endpoint))

    async def _check(self, endpoint: Endpoint) -> None:
        models = await endpoint.client.models()
        if endpoint.state != "checking":
            # An answer to an earlier request has said more by now.
            return
        if isinstance(models, Failed):
            is_first = endpoint.silent_since is None
            endpoint.failed(models, time.monotonic(), is_check=True)
            if is_first:
                _log.warning("%s: %s; it is tried again", endpoint.url, models.message)
            return
        if isinstance(models, Unusable):
            self._put_out(endpoint, models.message)
            return
        model = self._asked_model or self._model
        if model and models and model not in models:
            self._put_out(endpoint, f"serves {', '.join(models)}, not {model} (regenerate.model)")
        elif not model and len(models) != 1:
            listed = ", ".join(models) or "no model"
            self._put_out(endpoint, f"lists {listed}: name one in regenerate.model")
        else:
            self._model = model or models[0]
            if not self._is_named:
                self._results.named(self._model, endpoint.url)
                self._is_named = True
            endpoint.checked(self._model)

    def _start_asking(self, now: float) -> None:
        while True:
            free = [(room, e) for e in self.endpoints if (room := e.room(now)) > 0]
            # The one with most room first: so the work is spread where there is little of it.
            for _, endpoint in sorted(free, key=lambda pair: -pair[0]):
                job = self._take(endpoint, now)
                if job is not None and self._is_spent(job):
                    # Since its last failure the endpoint has answered others.
                    self._begin(self._give_up(job))
                    break
                if job is not None:
                    endpoint.sent(is_retry=bool(job.failures))
                    self._untried += not job.failures
                    self._begin(self._ask(endpoint, job))
                    break
            else:
                return

    def _take(self, endpoint: Endpoint, now: float) -> _Job | None:
        # A prompt that nobody has failed over is the fairer probe.
        if endpoint.state == "half-open" and (job := self._take_fresh()) is not None:
            return job
        others = any(e.is_usable and e is not endpoint for e in self.endpoints)
        for place, job in enumerate(self._again):
            wait = self._pace.other_first if others and job.last is endpoint else 0.0
            if now >= job.due + wait:
                return self._again.pop(place)
        return self._take_fresh()

    def _take_fresh(self) -> _Job | None:
        if self._has_fresh:
            question = next(self._fresh, None)
            if question is not None:
                return _Job(question)
            self._has_fresh = False
        return None

    async def _ask(self, endpoint: Endpoint, job: _Job) -> None:
        began = time.monotonic()
        is_untried = not job.failures
        try:
            outcome = await endpoint.client.ask(job.question, endpoint.model)
            self._untried -= is_untried
            await self._settle(endpoint, job, outcome, time.monotonic() - began)
        finally:
            endpoint.in_flight -= 1

    async def _settle(
        self,
        endpoint: Endpoint,
        job: _Job,
        outcome: Reply | Rejected | Unusable | Failed,
        seconds: float,
    ) -> None:
        if isinstance(outcome, Reply):
            try:
                taken = self._results.read(job.question, outcome)
            except BadReply as error:
                outcome = Failed("malformed", str(error))
            except WrongPrompt as error:
                outcome = Unusable(str(error))
            else:
                self._tell_closed(endpoint, closes=endpoint.heard(seconds, tokens=taken.tokens))
                await self._try(endpoint, Held(job, taken, taken.said))
                return
        if isinstance(outcome, Rejected):
            self._tell_closed(endpoint, closes=endpoint.heard(seconds, tokens=None))
            await self._try(endpoint, Held(job, None, outcome.message))
        elif isinstance(outcome, Unusable):
            self._put_out(endpoint, outcome.message)
            self._again.append(job)
        elif isinstance(outcome, Failed):
            await self._failed(endpoint, job, outcome)

    async def _try(self, endpoint: Endpoint, held: Held) -> None:
        """Keep an outcome, unless it may say more of the endpoint than of the prompt."""
        trial = self._trials[endpoint]
        if held.taken is not None and not held.taken.fault:
            trial.is_over = True
            await self._release(trial)
        elif not trial.is_over and not held.job.question.is_repeated:
            if endpoint.state == "out":
                self._again.append(held.job)
            elif verdict := trial.hold(held, self._pace):
                self._put_out(endpoint, verdict)
            return
        await self._settled(held)

    async def _release(self, trial: Trial) -> None:
        for held in trial.release():
            await self._settled(held)

    async def _settled(self, held: Held) -> None:
        if held.taken is None:
            await self._results.reject(held.job.question, held.said)
        else:
            await self._results.keep(held.job.question, held.taken.answer)

    async def _failed(self, endpoint: Endpoint, job: _Job, failure: Failed) -> None:
        if endpoint.failed(failure, time.monotonic()):
            _log.warning(
                "%s: %s; left alone for %.1f s",
                endpoint.url, failure.message, endpoint.due - time.monotonic(),
            )  # fmt: skip
        if failure.kind != "connect":
            note = _Failure(endpoint.streak, 1 if failure.is_busy else _WHOLE)
            job.failures.append(note)
            if self._is_tail():
                # No other prompt will show whether the endpoint is there.
                note.is_proven = isinstance(await endpoint.client.models(), tuple)
                if note.is_proven:
                    endpoint.was_seen()
            job.said = f"{endpoint.url} {failure.message}"
        if self._is_spent(job):
            await self._give_up(job)
            return
        tries = max(1, len(job.failures))
        pause = grown(self._pace.retry_first, self._pace.retry_longest, tries, self._random)
        job.last, job.due = endpoint, time.monotonic() + pause
        self._again.append(job)

    def _is_spent(self, job: _Job) -> bool:
        return job.counted() >= _WHOLE * self._attempts

    async def _give_up(self, job: _Job) -> None:
        message = f"{len(job.failures)} failures, the last: {job.said}"
        await self._results.give_up(job.question, message)

    def _is_tail(self) -> bool:
        """Whether all that is left has failed before."""
        if not self._untried and (job := self._take_fresh()) is not None:
            self._again.append(job)
        is_fresh = self._has_fresh or self._untried or any(not j.failures for j in self._again)
        return not is_fresh

    def _put_out(self, endpoint: Endpoint, why: str) -> None:
        if endpoint.state != "out":
            endpoint.put_out(why)
            _log.warning("%s: not used any more: %s", endpoint.url, why)
        self._again += [held.job for held in self._trials[endpoint].release()]

    def _tell_closed(self, endpoint: Endpoint, *, closes: bool) -> None:
        if closes:
            _log.info("%s: answers again", endpoint.url)
