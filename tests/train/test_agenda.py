"""Positions are handed out once, come back when they are lost, and a resume knows which."""

import queue
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from paceline.flow.channel import Channel
from paceline.flow.remote import Remote, RemotePolicy
from paceline.recipe.schema import TargetRecipe
from paceline.train import agenda as agenda_module
from paceline.train import batches as batches_module
from paceline.train import online
from paceline.train.agenda import Agenda
from paceline.train.batches import Batches, OnlineSamples
from paceline.train.capture import CaptureJob
from paceline.train.online import TargetSide


class Consumption(RuleBasedStateMachine):
    """Workers take, lose and consume; the training is resumed, or goes back, in between."""

    END = 40

    def __init__(self) -> None:
        super().__init__()
        self.agenda = Agenda(consumed=0, owed=(), end=self.END)
        self.out: list[int] = []
        self.done: set[int] = set()
        self.marked: set[int] = set()

    @rule(count=st.integers(1, 7))
    def take(self, count: int) -> None:
        self.out += self.agenda.take_more(count)

    @rule(data=st.data())
    def consume(self, data) -> None:
        chosen = data.draw(st.sets(st.sampled_from(self.out))) if self.out else set()
        self.agenda.consume(chosen)
        self.done |= chosen
        self.out = [p for p in self.out if p not in chosen]

    @rule(data=st.data())
    def lose(self, data) -> None:
        chosen = data.draw(st.sets(st.sampled_from(self.out))) if self.out else set()
        self.agenda.again(chosen)
        self.out = [p for p in self.out if p not in chosen]

    @rule()
    def mark(self) -> None:
        self.agenda.mark()
        self.marked = set(self.done)

    @rule()
    def roll_back(self) -> None:
        self.agenda.roll_back()
        self.done = set(self.marked)

    @rule()
    def resume(self) -> None:
        consumed, owed = self.agenda.consumed, self.agenda.owed
        self.agenda = Agenda(consumed=consumed, owed=owed, end=self.END)
        self.out, self.marked = [], set(self.done)

    @invariant()
    def none_is_lost_and_none_is_twice(self) -> None:
        assert self.agenda.consumed == len(self.done)
        assert len(set(self.out)) == len(self.out)
        assert not self.done & set(self.out)

    def teardown(self) -> None:
        rest = self.agenda.take_more(self.END)
        assert sorted([*self.done, *self.out, *rest]) == list(range(self.END))


TestConsumption = Consumption.TestCase


@given(st.integers(0, 30))
def test_what_was_consumed_in_order_needs_no_list(count):
    agenda = Agenda(consumed=0, owed=(), end=30)
    agenda.take_more(30)
    agenda.consume(range(count))
    assert agenda.owed == ()


def test_a_position_that_nobody_has_cannot_be_consumed():
    agenda = Agenda(consumed=0, owed=(), end=3)
    agenda.take_more(1)
    with pytest.raises(ValueError, match="nobody has"):
        agenda.consume([0, 1])
    assert agenda.consumed == 0


def test_who_waits_hears_of_what_comes_back_and_of_the_end():
    agenda = Agenda(consumed=0, owed=(), end=1)
    assert agenda.take() == 0
    found: list[int | None] = []
    first = threading.Event()

    def wait() -> None:
        found.append(agenda.take())
        first.set()
        found.append(agenda.take())

    thread = threading.Thread(target=wait)
    thread.start()
    assert not agenda.is_exhausted(0)
    assert agenda.is_exhausted(1)
    agenda.again([0])
    assert first.wait(10)
    agenda.close()
    thread.join(5)
    assert found == [0, None]


SAMPLES = 3


def online_samples() -> OnlineSamples:
    return OnlineSamples(
        lines=np.arange(SAMPLES),
        tokens=np.full(SAMPLES, 10, dtype=np.int32),
        sample_of=lambda position: position,
        ids=[f"{n:032x}" for n in range(SAMPLES)],
        batch_tokens=10,
    )


def by_agenda(agenda: Agenda, got: Callable[[int], None]) -> Callable[[], None]:
    def take() -> None:
        while (position := agenda.take()) is not None:
            got(position)

    return take


def by_reader(agenda: Agenda, got: Callable[[int], None]) -> Callable[[], None]:
    batches = Batches(online_samples(), agenda, lambda _: True)

    def read() -> None:
        while (position := batches.to_read()) is not None:
            got(position)

    return read


def by_target(agenda: Agenda, got: Callable[[int], None]) -> Callable[[], None]:
    class Side(TargetSide):
        def _feed(self, remote: Remote, first: tuple[int, ...]) -> None:
            for position in first:
                got(position)

    job = CaptureJob(
        target=TargetRecipe(path="none"),
        identity="",
        corpus=Path("none"),
        layer_ids=(1,),
        last=True,
        dtype="float32",
        chunk_tokens=8,
        check_positions=(),
    )
    side = Side(
        job,
        online_samples(),
        agenda,
        Channel(1),
        devices=("cpu",),
        policy=RemotePolicy(),
        report=lambda *_: None,
    )
    return side._threads[0].run


@pytest.mark.parametrize("waiting", [by_agenda, by_reader, by_target])
def test_who_hands_out_stays_for_what_the_last_checkpoint_may_lose(waiting, monkeypatch):
    """All is consumed, and a drafter dies while that is saved: everything comes again."""
    for module in (agenda_module, batches_module, online):
        monkeypatch.setattr(module, "_GLANCE", 0.01)
    agenda = Agenda(consumed=0, owed=(), end=SAMPLES)
    got: queue.SimpleQueue[int] = queue.SimpleQueue()
    thread = threading.Thread(target=waiting(agenda, got.put), daemon=True)
    thread.start()
    for _ in range(2):
        positions = [got.get(timeout=5) for _ in range(SAMPLES)]
        assert sorted(positions) == list(range(SAMPLES))
        agenda.consume(positions)
        # It has looked whether all is over.
        thread.join(0.2)
        agenda.roll_back()
    agenda.close()
    thread.join(5)
    assert not thread.is_alive()
