"""Calls that are made again where their error may pass."""

import errno
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from paceline.durable import patience as module
from paceline.durable.errors import StoreFailed
from paceline.durable.faulty import Fault, FaultyStore
from paceline.durable.patience import Patience, PatientStore
from paceline.durable.store import MemoryStore


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(module, "_FIRST_PAUSE", 0.002)


class Told:
    def __init__(self):
        self.waits: list[tuple[str, str]] = []
        self.ends: list[tuple[str, float]] = []

    def patience(self, seconds=20.0):
        return Patience(
            seconds, lambda *wait: self.waits.append(wait), lambda *end: self.ends.append(end)
        )


def failing(times, error):
    left = [times]
    lock = threading.Lock()

    def call():
        with lock:
            left[0] -= 1
            if left[0] >= 0:
                raise error
        return "value"

    return call


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (StoreFailed("s3://b: no answer", transient=True), "store"),
        (OSError(errno.ENOSPC, "No space left on device"), "space"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "space"),
    ],
)
def test_what_passes_is_waited_for_and_told_once(error, kind):
    told = Told()
    assert told.patience()(failing(4, error)) == "value"
    assert told.waits == [(kind, str(error))]
    assert [end[0] for end in told.ends] == [kind]
    assert 0 < told.ends[0][1] < 5


@pytest.mark.parametrize(
    "error",
    [
        StoreFailed("s3://b: 403", transient=False),
        OSError(errno.EACCES, "Permission denied"),
        KeyError("gone"),
    ],
)
def test_what_does_not_pass_is_raised_at_once(error):
    told = Told()
    with pytest.raises(type(error)) as caught:
        told.patience()(failing(1, error))
    assert caught.value is error
    assert told.waits == told.ends == []


def test_patience_ends_with_the_error_and_the_wait():
    told = Told()
    error = StoreFailed("s3://b: no answer", transient=True)
    with pytest.raises(StoreFailed) as caught:
        told.patience(seconds=0.05)(failing(10**9, error))
    assert caught.value is error
    assert len(told.waits) == len(told.ends) == 1


def test_threads_that_wait_at_the_same_time_are_one_wait():
    told = Told()
    patience = told.patience()
    call = failing(40, StoreFailed("s3://b: no answer", transient=True))
    together = threading.Barrier(8)

    def work(_: int) -> str:
        together.wait(10)
        return patience(call)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(8))) == ["value"] * 8
    assert len(told.waits) == len(told.ends)
    assert len(told.waits) < 8


@pytest.mark.parametrize("fault", [Fault.ERROR_BEFORE, Fault.ERROR_AFTER])
def test_a_patient_store_is_a_store_that_seldom_fails(fault):
    inner = MemoryStore()
    store = PatientStore(FaultyStore(inner, seed=3, faults={fault: 0.4}), Told().patience())
    for number in range(20):
        store.put(f"k{number:02d}", b"%d" % number)
    assert [item.key for item in store.list("k")] == [f"k{n:02d}" for n in range(20)]
    assert [item.key for item in store.list("k", after="k17")] == ["k18", "k19"]
    assert all(store.head(f"k{n:02d}") == inner.head(f"k{n:02d}") for n in range(20))
    assert store.get_range("k11", 0, 2) == b"11"
    store.delete(f"k{n:02d}" for n in range(5))
    assert len([*store.list("")]) == 15


def test_a_listing_that_breaks_off_goes_on_where_it_was():
    inner = MemoryStore()
    for number in range(9):
        inner.put(f"k{number}", b"")

    class Breaking(MemoryStore):
        breaks = 3

        def list(self, prefix, after=""):
            for place, item in enumerate(inner.list(prefix, after)):
                if place == 2 and self.breaks:
                    self.breaks -= 1
                    raise StoreFailed("cut off", transient=True)
                yield item

    told = Told()
    store = PatientStore(Breaking(), told.patience())
    assert [item.key for item in store.list("")] == [f"k{n}" for n in range(9)]
    assert len(told.waits) == 3
