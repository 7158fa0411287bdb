"""The counts of `regenerate`: where every prompt went, how answers ended, and how fast."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.corpus.answer_reasons import CUT, FAILED, LOOP, TOO_FEW, advice, is_of_server
from paceline.corpus.coverage import TokenCoverage
from paceline.corpus.groups import Answer
from paceline.corpus.loops import is_loop
from paceline.durable.errors import DataError, IntegrityError
from paceline.recipe.schema import CorpusRecipe, RegenerateRecipe
from paceline.types import Sample, Split
from paceline.watch.events import Counts

_LOG_SECONDS = 10.0

_log = logging.getLogger(__name__)


AskAgain = Callable[[Sequence[str]], str]
"""The command that has prompts asked again that are left out for these reasons."""

_FEW = 0.03
"""Share of prompts without an answer of use that is not worth a warning."""


def reason_against(
    answer: Answer, corpus: CorpusRecipe, recipe: RegenerateRecipe, *, loop: bool
) -> str | None:
    """Why an answer, a `loop` or not, is left out, or None."""
    # A loop is why an answer never came to its end, so it goes first.
    if loop and recipe.on_loop == "exclude":
        return LOOP
    if answer.finish == "length" and recipe.on_length == "exclude":
        return CUT
    return TOO_FEW if len(answer.ids) < corpus.min_loss_tokens else None


@dataclass(slots=True)
class AnswerTally:
    """Where every prompt went, and how the answers ended."""

    prepared: int = 0
    heldout: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    """Accepted, by split."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Quarantined, by reason."""
    said: dict[str, str] = field(default_factory=dict)
    """What servers said of the first prompt of a reason."""
    finish: Counter[str] = field(default_factory=Counter)
    loops: int = 0
    tokens: int = 0
    """Generated, in all answers."""
    loss_tokens: int = 0
    """In accepted ones."""
    coverage: TokenCoverage = field(default_factory=TokenCoverage)
    """Of the answers that are trained on."""

    def judge(self, answer: Answer, corpus: CorpusRecipe, recipe: RegenerateRecipe) -> str | None:
        """Count an answer; the reason to leave it out, or None."""
        self.finish[answer.finish] += 1
        self.tokens += len(answer.ids)
        loop = is_loop(answer.ids, recipe.loop_repeats)
        self.loops += loop
        reason = reason_against(answer, corpus, recipe, loop=loop)
        if reason is not None:
            self.reasons[reason] += 1
        return reason

    def refuse(self, reason: str, detail: str) -> None:
        """Count a prompt that has no answer to judge, and remember the first words on it."""
        self.reasons[reason] += 1
        self.said.setdefault(reason, detail)

    def accept(self, sample: Sample, ids: Sequence[int]) -> None:
        """Count a sample of the new corpus, and the ids of its answer."""
        if sample.split is Split.TRAIN:
            self.coverage.add_ids(ids)
        self.answers[sample.split] += 1
        self.loss_tokens += sample.num_loss_tokens

    def check(self, listed: Path, again: AskAgain | None) -> None:
        """Raise IntegrityError for a prompt unaccounted for, DataError for nothing to train on."""
        accounted = self.answers.total() + self.reasons.total() + self.heldout
        if accounted != self.prepared:
            raise IntegrityError(
                f"regenerate: {self.prepared} prompts were prepared and {accounted} are accounted "
                "for. This is a defect of Paceline: please report it."
            )
        if not self.answers[Split.TRAIN]:
            reasons = ", ".join(f"{n} {reason}" for reason, n in self.reasons.most_common())
            frequent = [reason for reason, _ in self.reasons.most_common()]
            told = advice(frequent[:3], is_served=again is not None)
            said = self._first_words(frequent[0]) if frequent else ""
            useless = [] if again is None else list(filter(is_of_server, frequent))
            asked = f" Then have them asked again: `{again(useless)}`." if again and useless else ""
            raise DataError(
                f"No answered training sample is left of {self.prepared} prompts "
                f"({reasons or 'none was asked'}){said}. They are listed in {listed}. {told}{asked}"
            )

    def _first_words(self, reason: str) -> str:
        said = self.said.get(reason)
        return f"; the first {reason}: {said}" if said else ""

    def warnings(self, again: AskAgain | None) -> Iterator[str]:
        """Of prompts that servers gave no answer of use to, where they are more than a few."""
        asked = self.answers.total() + self.reasons.total()
        for reason, count in self.reasons.most_common():
            if again is None or not is_of_server(reason) or reason == FAILED:
                continue
            if count > _FEW * asked:
                yield (
                    f"warning: {count} of {asked} prompts ({count / asked:.0%}) are left out as "
                    f"{reason}{self._first_words(reason)}. {advice([reason], is_served=True)} Then "
                    f"have them asked again: `{again([reason])}`"
                )

    def numbers(self) -> dict[str, Any]:
        """For the report: JSON values."""
        return {
            "prepared": self.prepared,
            "answered": self.answers.total(),
            "quarantined": self.reasons.total(),
            "heldout": self.heldout,
            "samples": {
                split.value: self.answers[split] for split in (Split.TRAIN, Split.VALIDATION)
            },
            "reasons": dict(sorted(self.reasons.items())),
            "finish": {name: self.finish[name] for name in ("stop", "length")},
            "loops": self.loops,
            "tokens": self.tokens,
            "loss_tokens": self.loss_tokens,
            "vocabulary": self.coverage.numbers(),
        }

    def lines(self) -> Iterator[str]:
        """For the terminal."""
        yield (
            f"{self.prepared} prompts = {self.answers.total()} answered + "
            f"{self.reasons.total()} quarantined + {self.heldout} held out"
        )
        for reason, count in self.reasons.most_common():
            yield f"  {count} {reason}"
        yield (
            f"{self.finish['stop']} answers came to their end, {self.finish['length']} were cut, "
            f"{self.loops} were loops"
        )
        yield f"{self.tokens} tokens generated, {self.loss_tokens} of them to train on"
        yield from self.coverage.lines()
        if self.finish["length"] > self.finish["stop"]:
            yield (
                "warning: most answers were cut; raise regenerate.max_new_tokens, or look for an "
                "end token that the target never writes"
            )


class Progress:
    """Tokens, rate and remaining time of this run; answers of earlier runs are apart."""

    def __init__(self, *, prompts: int, redone: Mapping[str, int]) -> None:
        """`prompts` are to be answered in all; `redone` counts damaged groups by reason."""
        self.finish: Counter[str] = Counter()
        """How answers ended, those of earlier runs too."""
        self._prompts = prompts
        self._redone = redone
        self.refused: Counter[str] = Counter()
        """Prompts that are done without an answer by reason, those of earlier runs too."""
        self._reused = 0
        self._reused_tokens = 0
        self._answered = 0
        self._tokens = 0
        self._start = self._logged = time.monotonic()
        self._seconds = 0.0

    def reuse(self, answers: Sequence[Answer], times: int = 1) -> None:
        """Count answers of an earlier run, or (-1) undo that; before the first `add`."""
        self._reused += times * len(answers)
        self._reused_tokens += times * sum(len(answer.ids) for answer in answers)
        for answer in answers:
            _shift(self.finish, answer.finish, times)
        self._start = time.monotonic()

    def reuse_refusal(self, reason: str, times: int = 1) -> None:
        """Count a prompt that an earlier run was done with, without an answer, or undo that."""
        self._reused += times
        _shift(self.refused, reason, times)

    def add(self, answers: Sequence[Answer]) -> None:
        """Count a group that is durable."""
        self.finish.update(answer.finish for answer in answers)
        self._answered += len(answers)
        self._tokens += sum(len(answer.ids) for answer in answers)
        self._seconds = time.monotonic() - self._start

    def refuse(self, reason: str) -> None:
        """Count a prompt that is done without an answer."""
        self.refused[reason] += 1
        self._answered += 1

    @property
    def done(self) -> int:
        """Prompts dealt with, by earlier runs too."""
        return self._reused + self._answered

    @property
    def _rate(self) -> float:
        return self._tokens / self._seconds if self._seconds else 0.0

    @property
    def _eta(self) -> float | None:
        """Seconds, from the tokens that an answer has had so far."""
        if not self._tokens:
            return None
        left = self._prompts - self.done
        return left * (self._tokens / self._answered) / self._rate

    def counts(self) -> Counts:
        """For events; answers are judged when all are there, refusals counted as they come."""
        return Counts(
            unit="prompts",
            total=self._prompts,
            done=self.done,
            quarantined=dict(self.refused),
            skipped=self._reused,
            redone=self._redone,
            redone_unit="groups",
            tokens=self._reused_tokens + self._tokens,
            rate=round(self._rate, 2) if self._tokens else None,
            eta=None if self._eta is None else round(self._eta, 1),
        )

    def log(self) -> None:
        """Write a line now and then."""
        now = time.monotonic()
        if now - self._logged >= _LOG_SECONDS:
            self._logged = now
            _log.info(
                "%d of %d prompts answered, %d tokens, %.0f tokens/s, %.0f s left",
                self.done,
                self._prompts,
                self._tokens,
                self._rate,
                self._eta or 0.0,
            )

    def numbers(self) -> dict[str, Any]:
        """For the report: JSON values."""
        return {
            "reused_answers": self._reused,
            "generated_tokens": self._tokens,
            "tokens_per_second": round(self._rate, 2),
            "seconds": round(self._seconds, 2),
        }

    def lines(self) -> Iterator[str]:
        """For the terminal."""
        if self._reused:
            yield f"{self._reused} answers were there from an earlier run"
        if self._tokens:
            yield (f"{self._tokens} tokens in {self._seconds:.1f} s, {self._rate:.1f} tokens/s")


def _shift(counts: Counter[str], name: str, times: int) -> None:
    counts[name] += times
    if not counts[name]:
        del counts[name]
