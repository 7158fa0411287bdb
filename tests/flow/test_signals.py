import contextlib
import os
import signal
import threading
import time

import pytest

from paceline.durable.errors import Interrupted
from paceline.flow import signals
from paceline.flow.launch import map_items
from paceline.flow.signals import (
    Terminated,
    ignore_signals,
    signals_held_back,
    signals_noted,
    sigterm_raises,
)

BOTH = (signal.SIGTERM, signal.SIGINT)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.fixture(autouse=True)
def _handlers_are_put_back():
    before = [signal.getsignal(number) for number in BOTH]
    yield
    after = [signal.getsignal(number) for number in BOTH]
    for number, handler in zip(BOTH, before, strict=True):
        signal.signal(number, handler)
    assert after == before


@pytest.mark.parametrize("number", BOTH)
def test_the_first_signal_is_noted_and_a_later_one_ends_at_once(monkeypatch, caplog, number):
    monkeypatch.setattr(signals, "_ECHO", 0.05)
    seen = []

    def body() -> None:
        with signals_noted("this step") as stop:
            assert not stop.asked
            send(number)
            assert stop.asked
            send(number)  # the echo of timeout(1)
            seen.append(stop)
            time.sleep(0.06)
            send(signal.SIGINT)
            seen.clear()

    with pytest.raises(KeyboardInterrupt):
        body()
    (stop,) = seen
    name = signal.Signals(number).name
    assert stop.name == name
    assert f"{name}: stopping after this step; once more stops at once" in caplog.text
    text = str(stop.interrupted("stopped after step 3"))
    assert text == f"{name}: stopped after step 3. The same command goes on from there."


def test_a_signal_that_the_body_did_not_see_is_passed_on():
    with pytest.raises(KeyboardInterrupt), signals_noted("this"):
        send(signal.SIGINT)
    with pytest.raises(Interrupted, match=r"^SIGTERM: "), sigterm_raises(), signals_noted("this"):
        send(signal.SIGTERM)


def test_an_error_of_the_body_is_not_hidden_by_a_noted_signal():
    def body() -> None:
        with signals_noted("this"):
            send(signal.SIGINT)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        body()


def test_a_signal_that_the_process_was_started_to_ignore_stays_ignored():
    """A shell starts what runs in the background like that: Ctrl-C is not meant for it."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with signals_noted("this") as stop:
            send(signal.SIGINT)
            assert not stop.asked
    finally:
        signal.signal(signal.SIGINT, before)


def test_in_another_thread_nothing_is_touched():
    seen = []

    def body() -> None:
        with signals_noted("this") as stop, sigterm_raises():
            seen.append((stop.asked, *(signal.getsignal(number) for number in BOTH)))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [(False, *(signal.getsignal(number) for number in BOTH))]


def test_sigterm_cleans_up_and_is_not_swallowed_by_a_library():
    cleaned = []

    def body() -> None:
        with sigterm_raises():
            try:
                with contextlib.suppress(Exception):  # what libraries do
                    send(signal.SIGTERM)
                pytest.fail("swallowed")
            except Terminated:
                cleaned.append(True)
                raise

    with pytest.raises(Interrupted) as caught:
        body()
    assert cleaned
    assert caught.value.exit_code == 130
    assert str(caught.value).endswith("The same command goes on from there.")


def test_signals_held_back_come_afterwards():
    def body() -> None:
        with signals_noted("this") as stop:
            with signals_held_back():
                send(signal.SIGTERM)
                assert not stop.asked
            # Another thread of this process may have taken the signal, and be slow to wake.
            end = time.monotonic() + 10
            while not stop.asked and time.monotonic() < end:
                time.sleep(0.001)
            assert stop.asked
            raise stop.interrupted("stopped")

    with pytest.raises(Interrupted, match="SIGTERM: stopped"):
        body()


def test_a_worker_ignores_both():
    before = [signal.getsignal(number) for number in BOTH]
    try:
        with signals_held_back():
            ignore_signals()
            for number in BOTH:
                send(number)
    finally:
        for number, handler in zip(BOTH, before, strict=True):
            signal.signal(number, handler)


@pytest.mark.parametrize("at", [1, 3])
def test_the_inline_map_finishes_the_item_and_says_how_far_it_came(at):
    done = []

    def setup(_: None):
        def handle(item: int) -> int:
            if item == at:
                send(signal.SIGTERM)
            return item

        return handle

    with pytest.raises(Interrupted, match=rf"^SIGTERM: stopped after {at} of the 3 shards that"):
        map_items(
            setup,
            None,
            [1, 2, 3],
            workers=1,
            threads=1,
            on_result=lambda item, _: done.append(item),
            what="shards",
        )
    assert done == [1, 2, 3][:at]


def test_while_the_setup_runs_here_a_signal_is_the_callers():
    def setup(_: None):
        send(signal.SIGTERM)
        time.sleep(10)

    with pytest.raises(Interrupted, match="What was complete stands"), sigterm_raises():
        map_items(setup, None, [1], workers=1, threads=1, on_result=lambda *_: None)
