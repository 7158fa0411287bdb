"""Answers of servers at rest: one journal line each, in whatever order they came."""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import msgspec

from paceline.corpus.answer_reasons import FAILED
from paceline.corpus.groups import Answer, located
from paceline.durable.errors import IntegrityError, JournalDamaged
from paceline.durable.journal import Journal, record_at
from paceline.types import Sample, Split

_NAME = "answers.journal"
_ADVICE = "Put back a copy that is whole, or remove {path} to have all prompts asked again."


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A prompt without an answer to train on, and why."""

    prompt_id: str
    reason: str
    detail: str
    finish: str = ""
    ids: list[int] = field(default_factory=list)
    """What was generated, where the server told."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A line of the journal, in words."""

    said: Answer | Refused
    is_retokenised: bool = False
    """The ids were made here from a text."""
    is_unchecked: bool = False
    """The server did not tell which prompt it had processed."""

    @property
    def is_done(self) -> bool:
        """Whether nobody asks again."""
        return not (isinstance(self.said, Refused) and self.said.reason == FAILED)


class ServedStore:
    """`corpus/answers.journal`: who has been answered, under the fingerprint of this very stage.

    Lines of another fingerprint are passed over. Memory holds the place of each answer, no text.
    One process at a time: raises UserError where another has the journal open.
    """

    def __init__(
        self, folder: Path, fingerprint: str, on_found: Callable[[Kept, int], None]
    ) -> None:
        """`on_found` gets, with 1, what earlier runs have kept and nobody asks again.

        What is dropped later, to be asked again, it gets once more, with -1; until `begin`.
        """
        self.path = folder / _NAME
        self.flags: Counter[str] = Counter()
        """Of all answers: how many are `retokenised`, `unchecked`."""
        self.model: str | None = None
        """What the servers call the target, since the first run."""
        self._fingerprint = fingerprint
        self._unsaid: dict[str, Any] | None = None
        self._places: dict[bytes, int] = {}
        self._failed: dict[bytes, int] = {}
        self._repeated: set[bytes] = set()
        self._on_found: Callable[[Kept, int], None] | None = on_found
        try:
            self._journal = Journal(self.path, on_record=self._note)
        except JournalDamaged as error:
            raise JournalDamaged(f"{error} {_ADVICE.format(path=self.path)}") from error
        # Those that were given up before are asked again.
        self._failed.clear()
        self._committer = _Committer(self._journal)

    @staticmethod
    def holds_any(folder: Path) -> bool:
        """Whether any answers lie there, whatever made them."""
        path = folder / _NAME
        return path.is_file() and path.stat().st_size > 0

    def has(self, prompt_id: str) -> bool:
        """Whether the prompt is done."""
        return bytes.fromhex(prompt_id) in self._places

    def is_repeated(self, prompt_id: str) -> bool:
        """Whether an earlier answer to the prompt was dropped, so that it is asked again."""
        return bytes.fromhex(prompt_id) in self._repeated

    def drop(self, reason_of: Callable[[Kept], str | None], reasons: Collection[str]) -> int:
        """Have answers that are left out for one of `reasons` asked again; how many these are.

        `reason_of` says why an answer is left out, or None. Durable on return.
        """
        dropped: list[dict[str, Any]] = []
        with self.path.open("rb") as file:
            for place in self._places.values():
                record = record_at(file, place)
                reason = None if record is None else reason_of(_kept(record))
                if record is not None and reason in reasons:
                    again = {"kind": "again", "fingerprint": self._fingerprint}
                    dropped.append({**again, "prompt_id": record["prompt_id"], "reason": reason})
        self._journal.extend(dropped)
        return len(dropped)

    def begin(self) -> None:
        """What comes from here on is new, and `on_found` hears of none of it."""
        self._on_found = None

    def name_model(self, model: str) -> None:
        """Have the first answer say what the servers call the target."""
        self._unsaid = {"kind": "model", "fingerprint": self._fingerprint, "model": model}

    async def keep(self, kept: Kept) -> None:
        """Return once it is durable; those that come together share one sync of the disk."""
        said = kept.said
        record: dict[str, Any] = {
            "kind": "answer",
            "fingerprint": self._fingerprint,
            "prompt_id": said.prompt_id,
            "finish": said.finish,
            "ids": said.ids,
        }
        if isinstance(said, Refused):
            record |= {"reason": said.reason, "detail": said.detail}
        if kept.is_retokenised:
            record["retokenised"] = True
        if kept.is_unchecked:
            record["unchecked"] = True
        # Without an answer there is nothing that another model's could be mixed with.
        first, self._unsaid = self._unsaid, None
        await self._committer.put([record] if first is None else [first, record])

    def answered(self, prepared: Path) -> Iterator[tuple[Sample, Answer | Refused | None]]:
        """Every sample of the prepared corpus in order, with its answer; None for held-out ones.

        Raises IntegrityError where one is missing, or not as it was written.
        """
        with self.path.open("rb") as file:
            for _, sample in located(prepared):
                if sample.split is Split.HELDOUT:
                    yield sample, None
                    continue
                key = bytes.fromhex(sample.prompt_id)
                place = self._places.get(key, self._failed.get(key))
                record = None if place is None else record_at(file, place)
                if record is None or record.get("prompt_id") != sample.prompt_id:
                    raise IntegrityError(
                        f"{self.path}: the answer to prompt {sample.prompt_id} is not there as it "
                        f"was written. {_ADVICE.format(path=self.path)}"
                    )
                yield sample, _kept(record).said

    def _note(self, record: dict[str, Any], offset: int) -> None:
        if record.get("fingerprint") != self._fingerprint:
            return
        if record["kind"] == "model":
            self.model = record["model"]
            return
        if record["kind"] == "again":
            self._forget(record)
            return
        kept = _kept(record)
        key = bytes.fromhex(kept.said.prompt_id)
        if not kept.is_done:
            self._failed[key] = offset
            return
        self._places[key] = offset
        self.flags["retokenised"] += kept.is_retokenised
        self.flags["unchecked"] += kept.is_unchecked
        if self._on_found is not None:
            self._on_found(kept, 1)

    def _forget(self, record: dict[str, Any]) -> None:
        key = bytes.fromhex(record["prompt_id"])
        self._repeated.add(key)
        place = self._places.pop(key, None)
        if place is None:
            return
        with self.path.open("rb") as file:
            found = record_at(file, place)
        if found is not None:
            kept = _kept(found)
            self.flags["retokenised"] -= kept.is_retokenised
            self.flags["unchecked"] -= kept.is_unchecked
            if self._on_found is not None:
                self._on_found(kept, -1)
        if not self._places:
            # With the last answer goes what another model's could be mixed with.
            self.model = None

    def close(self) -> None:
        """Let another process have the journal."""
        self._journal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _kept(record: dict[str, Any]) -> Kept:
    fields = {key: record[key] for key in ("prompt_id", "ids", "finish")}
    said = (
        Refused(**fields, reason=record["reason"], detail=record["detail"])
        if "reason" in record
        else msgspec.convert(fields, Answer)
    )
    return Kept(said, "retokenised" in record, "unchecked" in record)


class _Committer:
    """Appends records in batches of what has come while the disk was at the last one."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._waiting: list[tuple[list[dict[str, Any]], asyncio.Future[None]]] = []
        self._task: asyncio.Task[None] | None = None

    async def put(self, records: list[dict[str, Any]]) -> None:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        self._waiting.append((records, done))
        if self._task is None:
            self._task = loop.create_task(self._work())
        await done

    async def _work(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting, []
                records = [record for some, _ in batch for record in some]
                error: Exception | None = None
                try:
                    await asyncio.to_thread(self._journal.extend, records)
                except Exception as raised:  # noqa: BLE001  whoever waits for the batch raises it
                    error = raised
                for _, done in batch:
                    if done.done():
                        continue
                    if error is None:
                        done.set_result(None)
                    else:
                        done.set_exception(error)
        finally:
            self._task = None
