"""Plain and speculative decoding; the output is the target's either way.

Both run through the same session, so a speed-up compares nothing but the drafting.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from paceline.decode.clock import Clock
from paceline.decode.propose import Drafting, Proposing
from paceline.decode.sampling import GREEDY, PositionKeyedNoise, Sampling, choice_margin, choose
from paceline.decode.session import open_session
from paceline.drafter.dflash import DFlash
from paceline.drafter.session import DraftSession
from paceline.target.head import TargetHead
from paceline.target.load import Target
from paceline.types.tree import DraftTree, TreeShape


@dataclass(frozen=True)
class Decoded:
    """One decoded answer."""

    ids: tuple[int, ...]
    """The answer, cut after its end token or at the limit."""
    rounds: tuple[int, ...]
    """Tokens each verification committed, the target's own included.

    A round is cut after an end token; the round that meets the token limit counts whole, since
    the limit, unlike the end, says nothing about the drafter (and a cut would bias the mean).
    """
    finish: str
    """`stop` or `length`."""
    cpu_seconds: dict[str, float]
    """By phase: prefill, draft, tree, verify, commit. Of requests decoded side by side, each has
    its share."""
    phase_seconds: dict[str, float]
    """The same in wall time."""

    @property
    def wall_seconds(self) -> float:
        """From the first token on: the prompt's processing is in neither side's rate."""
        return sum(s for phase, s in self.phase_seconds.items() if phase != "prefill")

    @property
    def tau(self) -> float:
        """Mean tokens per verification; 0 where there was none."""
        return sum(self.rounds) / len(self.rounds) if self.rounds else 0.0


@dataclass(frozen=True)
class Answer(Decoded):
    """A plainly decoded answer with what is needed to simulate any drafter on it."""

    features: torch.Tensor = field(repr=False, default_factory=lambda: torch.empty(0))
    """[S + n - 1, L, H]: prompt and answer, the last token excepted (it was never processed)."""
    margins: tuple[float, ...] = ()
    """Per answer token, how far the choice was from another one, in units of logits."""


@dataclass(frozen=True)
class Round:
    """What one verification gave one request."""

    request: int
    """Its place among the prompts."""
    tokens: tuple[int, ...]
    """Committed, and cut after an end token; the target's own is the last, unless cut."""
    accepted: int
    """Drafted tokens that were accepted, before the cut."""


def decode_plain(
    target: Target,
    prompt: Sequence[int],
    *,
    taps: tuple[int, ...],
    max_new_tokens: int,
    eos_ids: frozenset[int],
    sampling: Sampling = GREEDY,
    noise: PositionKeyedNoise | None = None,
) -> Answer:
    """Decode one token per pass of the target. `noise` is needed where `sampling` draws."""
    clock = Clock(target.model.device)
    session = open_session(target, taps)
    noises = [] if noise is None else [noise]
    with clock("prefill"):
        [logits], [features] = session.prefill([prompt])
    rows, ids, margins = [features], [], []
    while True:
        position = len(prompt) + len(ids)
        with clock("commit"):
            [token] = choose(logits[None], noises, [position], sampling)
        margins.append(choice_margin(logits, noise, position, sampling))
        ids.append(token)
        if token in eos_ids or len(ids) == max_new_tokens:
            break
        with clock("verify"):
            [all_logits] = session.verify([DraftTree.chain(token, ())])
        with clock("commit"):
            [features] = session.commit([(0,)])
        rows.append(features)
        logits = all_logits[-1]
    return Answer(
        ids=tuple(ids),
        rounds=(1,) * (len(ids) - 1),
        finish="stop" if ids[-1] in eos_ids else "length",
        cpu_seconds=clock.cpu,
        phase_seconds=clock.wall,
        features=torch.cat(rows),
        margins=tuple(margins),
    )


def decode_speculative(
    target: Target,
    drafter: DFlash,
    head: TargetHead,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    eos_ids: frozenset[int],
    budget: TreeShape | int | None = None,
    temperatures: Sequence[float] | None = None,
    sampling: Sampling = GREEDY,
    noise: PositionKeyedNoise | None = None,
    drafting: Drafting = Drafting.GREEDY,
) -> Decoded:
    """Speculative decoding of one request; see `Decoding`."""
    decoding = Decoding(
        target,
        drafter,
        head,
        [prompt],
        max_new_tokens=max_new_tokens,
        eos_ids=eos_ids,
        budget=budget,
        temperatures=temperatures,
        sampling=sampling,
        noises=None if noise is None else [noise],
        drafting=drafting,
    )
    return decoding.run()[0]


class Decoding:
    """Speculative decoding of B requests side by side, round by round.

    With a chain, or a draft tree of that budget. Token for token what `decode_plain` gives with
    the same noise (unless `drafting` is sampled: then in distribution), wherever the target's
    choice is not so close that differently shaped products round it either way. A request that is
    done leaves the batch.
    """

    def __init__(
        self,
        target: Target,
        drafter: DFlash,
        head: TargetHead,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        eos_ids: frozenset[int],
        budget: TreeShape | int | None = None,
        temperatures: Sequence[float] | None = None,
        sampling: Sampling = GREEDY,
        noises: Sequence[PositionKeyedNoise] | None = None,
        drafting: Drafting = Drafting.GREEDY,
    ) -> None:
        """Process the prompts; each has its first token afterwards.

        `head` is `drafter.narrowed` of the target's, made once for all requests; `noises`, one per
        prompt, are needed where `sampling` draws.
        """
        self._limit, self._eos = max_new_tokens, eos_ids
        self._clock = Clock(target.model.device)
        self._session = open_session(target, drafter.config.taps, len(prompts))
        each: Sequence[PositionKeyedNoise | None] = noises or [None] * len(prompts)
        with self._clock("prefill"):
            logits, features = self._session.prefill(prompts)
        self._requests = []
        for number, prompt in enumerate(prompts):
            way = Proposing(
                drafter=drafter,
                sampling=sampling,
                noise=each[number],
                shape=TreeShape(budget) if isinstance(budget, int) else budget,
                temperatures=temperatures,
                drafting=drafting,
            )
            request = _Request(number, len(prompt), way, DraftSession(drafter, head))
            noise = [] if way.noise is None else [way.noise]
            request.ids = choose(logits[number][None], noise, [len(prompt)], sampling)
            request.features = features[number]
            self._requests.append(request)
        self._alive = self._requests
        self._settle(self._requests)
        self._drop_finished()

    @property
    def is_done(self) -> bool:
        """Whether every request has its answer."""
        return not self._alive

    def answer(self, request: int) -> tuple[int, ...]:
        """The tokens of a request so far."""
        return tuple(self._requests[request].ids[: self._limit])

    def step(self) -> list[Round]:
        """One round for every request that is not done."""
        alive, clock = self._alive, self._clock
        firsts = [request.position for request in alive]
        with torch.inference_mode():
            with clock("draft"):
                drafts = [request.draft() for request in alive]
            with clock("tree"):
                proposals = [
                    request.way.propose(request.ids[-1], logits, first)
                    for request, logits, first in zip(alive, drafts, firsts, strict=True)
                ]
            with clock("verify"):
                verified = self._session.verify([proposal.tree for proposal in proposals])
            with clock("commit"):
                accepted = [
                    request.way.accept(proposal, logits, first)
                    for request, proposal, logits, first in zip(
                        alive, proposals, verified, firsts, strict=True
                    )
                ]
                features = self._session.commit([found.path for found in accepted])
        rounds = []
        for request, found, rows in zip(alive, accepted, features, strict=True):
            tokens = _until_end(found.tokens, self._eos)
            request.take(tokens, rows)
            rounds.append(Round(request.number, tokens, found.depth))
        self._settle(alive)
        self._drop_finished()
        return rounds

    def run(self) -> list[Decoded]:
        """All rounds that are left; the answers, in the order of the prompts."""
        while not self.is_done:
            self.step()
        return [self.decoded(number) for number in range(len(self._requests))]

    def decoded(self, number: int) -> Decoded:
        """What a request has come to so far."""
        request = self._requests[number]
        ids = self.answer(number)
        return Decoded(
            ids=ids,
            rounds=tuple(request.rounds),
            finish="stop" if ids[-1] in self._eos else "length",
            cpu_seconds=request.cpu,
            phase_seconds=request.wall,
        )

    def _settle(self, requests: "Sequence[_Request]") -> None:
        """Share what the clock has counted among those that it was spent on."""
        for request in requests:
            for mine, spent in ((request.cpu, self._clock.cpu), (request.wall, self._clock.wall)):
                for phase, seconds in spent.items():
                    mine[phase] = mine.get(phase, 0.0) + seconds / len(requests)
        self._clock.cpu.clear()
        self._clock.wall.clear()

    def _drop_finished(self) -> None:
        going_on = [
            place
            for place, request in enumerate(self._alive)
            if request.ids[-1] not in self._eos and len(request.ids) < self._limit
        ]
        if len(going_on) < len(self._alive):
            self._alive = [self._alive[place] for place in going_on]
            if going_on:
                self._session.keep(going_on)


class _Request:
    """One request between two rounds."""

    def __init__(self, number: int, prompt: int, way: Proposing, session: DraftSession) -> None:
        self.number = number
        self.way = way
        self.ids: list[int] = []
        self.rounds: list[int] = []
        self.features: torch.Tensor | None = None
        """Of committed tokens that the drafter has not seen."""
        self.cpu: dict[str, float] = {}
        self.wall: dict[str, float] = {}
        self._prompt = prompt
        self._session = session

    @property
    def position(self) -> int:
        """Of the next token to be chosen, from the prompt's first."""
        return self._prompt + len(self.ids)

    def draft(self) -> torch.Tensor:
        """The drafter's logits fp32 [B - 1, K] behind the last token."""
        if self.features is not None:
            self._session.extend(self.features)
            self.features = None
        return self._session.slot_logits(self.ids[-1])

    def take(self, tokens: Sequence[int], features: torch.Tensor) -> None:
        """Append a round's tokens."""
        self.ids.extend(tokens)
        self.rounds.append(len(tokens))
        self.features = features


def _until_end(tokens: Sequence[int], eos_ids: frozenset[int]) -> tuple[int, ...]:
    for count, token in enumerate(tokens, start=1):
        if token in eos_ids:
            return tuple(tokens[:count])
    return tuple(tokens)
