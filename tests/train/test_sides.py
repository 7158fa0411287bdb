"""What is told of the two sides of a training's channel."""

import threading
import time
from typing import Any

import pytest

from paceline.flow.channel import Channel
from paceline.train.online import TargetMeters
from paceline.train.opening import Told
from paceline.train.sides import Sides
from paceline.watch.events import EventWriter


def put(channel: Channel[Any], seconds: float) -> threading.Thread:
    def later() -> None:
        time.sleep(seconds)
        channel.put("features", ["a"], 1)

    thread = threading.Thread(target=later)
    thread.start()
    return thread


def test_the_time_until_the_first_features_are_there_is_nobodys_wait():
    """Targets are loaded then: a split of the devices would change nothing."""
    channel: Channel[Any] = Channel(10)
    sides = Sides(targets=1, drafters=1)
    with sides.watching(channel, TargetMeters(tokens=100, seconds=1.0)):
        thread = put(channel, 0.4)
        assert channel.lease() is not None
        thread.join()
        assert sides.now(0)["lease_wait"] >= 0.4
        # Long beside what this thread takes to wake up, which does count.
        time.sleep(1.0)
    found = sides.now(0)
    assert found["drafters_wait"] < 0.1 < found["lease_wait"]
    assert list(sides.sentences()) == []


def test_a_wait_behind_the_first_features_is_told():
    channel: Channel[Any] = Channel(10)
    sides = Sides(targets=1, drafters=1)
    with sides.watching(channel, TargetMeters()):
        channel.put("features", ["a"], 1)
        assert channel.lease() is not None
        thread = put(channel, 0.4)
        assert channel.lease() is not None
        thread.join()
    assert sides.now(0)["drafters_wait"] > 0.5
    (said,) = sides.sentences()
    assert said.startswith("the drafter waits")


def test_offline_no_side_is_told_of():
    channel: Channel[Any] = Channel(10)
    sides = Sides(targets=1, drafters=1)
    assert sides.now(0) == {}
    with sides.watching(channel):
        with pytest.raises(TimeoutError):
            channel.lease(timeout=0.1)
        assert set(sides.now(0)) == {"queue_bytes", "put_wait", "lease_wait"}
    assert sides.numbers(0) == {}
    assert list(sides.sentences()) == []


def test_who_died_is_told_at_the_end(tmp_path):
    with EventWriter(tmp_path, "train") as events:
        told = Told(events)
        assert told.sentence() == ""
        for name in ("target 0 (cpu:0)", "drafter 1 (cpu:1)", "target 0 (cpu:0)"):
            told("worker", {"name": name, "what": "died", "how": "killed", "pid": 1})
        told("worker", {"name": "target 0 (cpu:0)", "what": "restarted", "how": "", "pid": 2})
    assert told.deaths == {"drafter 1 (cpu:1)": 1, "target 0 (cpu:0)": 2}
    assert told.sentence().endswith("drafter 1 (cpu:1) 1 time, target 0 (cpu:0) 2 times")
