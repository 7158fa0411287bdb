"""A worker process that answers: its deaths are told, survived and, where hopeless, named."""

import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.durable.errors import TargetError, UserError, WorkerFailed
from paceline.flow.process import environment_of
from paceline.flow.remote import Remote, RemoteDied, RemotePolicy

QUICK = RemotePolicy(backoff=0.01, restarts=4)


def answering(payload, _context):
    """What the process does with a request."""
    if payload == "broken":
        raise ValueError("no such thing")
    if payload == "refused":
        raise UserError("choose another device.")

    def answer(request, _path):
        match request:
            case ("die", number):
                os.kill(os.getpid(), number)
            case "raise":
                raise RuntimeError("unsound")
            case "fail":
                raise TargetError("this sample is odd.")
            case ("wait", seconds):
                time.sleep(seconds)
        return os.getpid(), request

    return answer


@pytest.fixture
def remote():
    made, told = [], []

    def make(payload=None, policy=QUICK) -> Remote:
        found = Remote(
            "helper", 3, answering, payload, policy=policy, environment=environment_of(1),
            report=lambda kind, fields: told.append((kind, fields.get("what"))),
        )  # fmt: skip
        found.told = told
        made.append(found)
        return found

    yield make
    for one in made:
        one.end()
        one.bury()
        assert one.pid is None or not Path(f"/proc/{one.pid}").exists()


def test_requests_are_answered_in_order_also_where_two_are_posted(remote):
    helper = remote()
    helper.start()
    helper.post(1)
    helper.post(2)
    assert [helper.answer()[1], helper.answer()[1]] == [1, 2]
    assert helper.ask(3) == (helper.pid, 3)


def test_a_death_is_told_and_the_next_process_goes_on(remote):
    helper = remote()
    helper.start()
    first = helper.pid
    with pytest.raises(RemoteDied, match="killed by SIGKILL"):
        helper.ask(("die", signal.SIGKILL))
    helper.restart("it died")
    assert helper.ask("again")[0] != first
    assert [what for _, what in helper.told] == ["started", "died", "restarted"]
    with pytest.raises(RemoteDied, match="RuntimeError: unsound") as died:
        helper.ask("raise")
    assert died.value.raised


def test_a_process_that_others_found_dead_is_not_left_behind(remote):
    helper = remote()
    helper.start()
    first = helper.pid
    os.kill(first, signal.SIGKILL)
    helper.restart("its memory is gone")
    assert helper.ask("again")[0] != first
    assert not Path(f"/proc/{first}").exists()


def test_one_that_rests_is_gone_and_begins_again_as_if_it_were_new(remote):
    helper = remote()
    helper.start()
    first = helper.pid
    helper.rest()
    assert helper.pid is None
    assert not Path(f"/proc/{first}").exists()
    helper.start()
    assert helper.ask("again")[0] != first
    assert helper.deaths == 0
    assert [what for _, what in helper.told] == ["started", "started"]


def test_one_that_is_frozen_is_told_by_its_name_killed_and_begun_again(remote, caplog):
    helper = remote(policy=replace(QUICK, stuck_after=0.5, kill_after=1.5))
    helper.start()
    os.kill(helper.pid, signal.SIGSTOP)
    with pytest.raises(RemoteDied, match="killed by SIGKILL"):
        helper.ask("never")
    assert "helper (process" in caplog.text
    assert "worker 3" not in caplog.text
    helper.restart("it was frozen")
    assert helper.ask("again")[1] == "again"


def test_what_it_cannot_do_and_is_sound_after_ends_no_process(remote):
    helper = remote()
    helper.start()
    with pytest.raises(WorkerFailed, match=r"helper: TargetError: this sample is odd\."):
        helper.ask("fail")
    assert helper.ask("still there")[1] == "still there"


def test_too_many_deaths_are_a_named_failure(remote):
    helper = remote()
    helper.start()
    for _ in range(QUICK.restarts):
        with pytest.raises(RemoteDied):
            helper.ask(("die", signal.SIGKILL))
        helper.restart("was killed by SIGKILL")
    with pytest.raises(WorkerFailed, match=r"helper has died 5 times.*SIGKILL"):
        helper.restart("was killed by SIGKILL")


def test_a_start_that_its_own_exception_ends_is_not_tried_for_ever(remote):
    with pytest.raises(WorkerFailed, match=r"does not start.*ValueError: no such thing"):
        remote("broken").start()


def test_what_no_further_start_would_mend_is_raised_as_it_is(remote):
    with pytest.raises(UserError, match=r"choose another device\."):
        remote("refused").start()


def test_ending_wakes_who_waits_for_an_answer(remote):
    helper = remote()
    helper.start()
    timer = threading.Timer(0.3, helper.end)
    timer.start()
    with pytest.raises(RemoteDied):
        helper.ask(("wait", 60))
    with pytest.raises(RemoteDied, match="ended"):
        helper.restart("x")
