"""Positions are handed out once, come back when they are lost, and a resume knows which."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from paceline.train.agenda import Agenda


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
