"""The store that fails on purpose: repeatable, and seen by whoever compares afterwards."""

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from paceline.durable.checksum import crc64
from paceline.durable.errors import StoreFailed
from paceline.durable.faulty import Fault, FaultyStore, by_chance
from paceline.durable.store import LocalStore, MemoryStore, Stat

DATA = bytes(range(256)) * 50
STAT = Stat(len(DATA), crc64(DATA))


def always(fault: Fault):
    return {fault: 1.0}


def calls_of(store: FaultyStore):
    return {
        "put": lambda: store.put("x", b"new"),
        "head": lambda: store.head("x"),
        "get_range": lambda: store.get_range("x", 0, 3),
        "list": lambda: store.list(""),
        "delete": lambda: store.delete(["x"]),
    }


@pytest.mark.parametrize("operation", calls_of(FaultyStore(MemoryStore())))
@pytest.mark.parametrize("fault", [Fault.ERROR_BEFORE, Fault.ERROR_AFTER])
def test_errors_before_and_after_the_effect(operation, fault):
    inner = MemoryStore()
    inner.put("x", b"old")
    store = FaultyStore(inner, faults=always(fault))
    with pytest.raises(StoreFailed, match=operation) as caught:
        calls_of(store)[operation]()
    assert caught.value.transient
    assert store.injected == {fault: 1}
    done = fault is Fault.ERROR_AFTER
    there = {"put": b"new" if done else b"old", "delete": None if done else b"old"}
    expected = there.get(operation, b"old")
    assert inner.head("x") == (None if expected is None else Stat(3, crc64(expected)))


@pytest.mark.parametrize(("fault", "kept"), [(Fault.TRUNCATED, 6400), (Fault.EMPTY, 0)])
def test_t_50_a_store_that_reports_as_whole_what_it_has_not(tmp_path, fault, kept):
    file = tmp_path / "staged"
    file.write_bytes(DATA)
    inner = LocalStore(tmp_path / "store")
    store = FaultyStore(inner, faults=lambda operation, key, number: fault if number == 1 else None)
    for source in (DATA, file):
        assert store.put(f"of-{type(source).__name__}", source, crc64(DATA)) == STAT
    for found in inner.list(""):
        # Whoever compares sees it, and the second try holds.
        assert store.head(found.key) == Stat(kept, crc64(DATA[:kept]))
        assert store.put(found.key, file) == store.head(found.key) == STAT
    assert store.injected == {fault: 2}
    assert file.read_bytes() == DATA


def test_truncation_is_of_puts_alone():
    store = FaultyStore(MemoryStore(), faults=lambda op, *_: None if op == "put" else Fault.EMPTY)
    store.put("x", DATA)
    assert store.get_range("x", 0, len(DATA)) == DATA
    assert store.head("x") == STAT
    assert store.injected == {}


def test_a_stall_is_long_and_then_done():
    store = FaultyStore(MemoryStore(), faults=always(Fault.STALL), stall_seconds=0.2)
    begun = time.monotonic()
    store.put("x", DATA)
    assert time.monotonic() - begun >= 0.2
    assert store.head("x") == STAT


def test_a_slow_link_is_one_for_all_threads():
    store = FaultyStore(MemoryStore(), bytes_per_second=10 * len(DATA))
    begun = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: store.put(f"x{n}", DATA), range(4)))
    assert time.monotonic() - begun >= 0.4
    begun = time.monotonic()
    store.get_range("x0", 0, len(DATA))
    assert time.monotonic() - begun >= 0.1


def outcome(seed: int, threads: int) -> tuple[dict[str, list[bool]], Counter[Fault]]:
    store = FaultyStore(
        MemoryStore(), seed=seed, faults={Fault.ERROR_BEFORE: 0.3, Fault.ERROR_AFTER: 0.2}
    )
    failed: dict[str, list[bool]] = {f"x{n}": [] for n in range(30)}
    start = threading.Barrier(threads)

    def work(keys: list[str]) -> None:
        start.wait()
        for key in keys:
            for _ in range(10):
                try:
                    store.put(key, b"1")
                except StoreFailed:
                    failed[key].append(True)
                else:
                    failed[key].append(False)

    keys = list(failed)
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, [keys[n::threads] for n in range(threads)]))
    return failed, store.injected


def test_a_seed_repeats_the_faults_however_threads_interleave():
    first = outcome(7, 1)
    assert outcome(7, 4) == first
    assert outcome(8, 1) != first
    assert 0.4 < sum(first[1].values()) / 300 < 0.6


def test_chances_that_are_none_are_refused():
    for faults in ({Fault.STALL: 0.6, Fault.EMPTY: 0.6}, {Fault.STALL: -0.1}):
        with pytest.raises(ValueError, match="probabilities"):
            by_chance(1, faults)


def test_what_it_holds_survives_it(tmp_path):
    FaultyStore(LocalStore(tmp_path)).put("x", DATA)
    assert FaultyStore(LocalStore(tmp_path)).head("x") == STAT
    assert FaultyStore(LocalStore(tmp_path)).url == LocalStore(tmp_path).url
