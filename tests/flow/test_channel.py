import threading
import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.durable.errors import ChannelClosed, ChannelFailed
from paceline.flow.channel import Channel


def _thread(work) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def _wait_until(condition) -> None:
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_items_come_out_in_order_and_close_drains():
    channel: Channel[int] = Channel(100)
    for i in range(5):
        channel.put(i, [f"s{i}"], 10)
    channel.close()
    assert [lease.item for lease in channel.leases()] == [0, 1, 2, 3, 4]
    assert channel.lease() is None
    with pytest.raises(ChannelClosed):
        channel.put(9, ["s9"], 1)


def test_a_lease_waits_no_longer_than_it_is_told_to():
    channel: Channel[int] = Channel(100)
    for timeout in (0.0, 0.05):
        with pytest.raises(TimeoutError, match="no item came"):
            channel.lease(timeout=timeout)
    channel.put(1, ["a"], 10)
    lease = channel.lease(timeout=0.0)
    assert lease is not None
    assert lease.item == 1
    channel.close()
    assert channel.lease(timeout=0.0) is None
    assert channel.meters().lease_wait >= 0.05


def test_put_blocks_on_bytes_until_a_release():
    channel: Channel[str] = Channel(100)
    channel.put("a", ["a"], 60)
    thread = _thread(lambda: channel.put("b", ["b"], 60))
    lease = channel.lease()
    assert lease is not None
    time.sleep(0.05)
    assert channel.meters().items_put == 1
    lease.release()
    thread.join(5)
    assert channel.meters().items_put == 2
    assert channel.meters().peak_bytes == 60


def test_a_release_counts_once_and_ends_the_use_of_the_item():
    channel: Channel[str] = Channel(100)
    channel.put("a", ["a"], 60)
    channel.put("b", ["b"], 40)
    lease = channel.lease()
    assert lease is not None
    with lease:
        assert lease.item == "a"
    lease.release()
    assert channel.meters().bytes_held == 40
    with pytest.raises(ValueError, match="released"):
        _ = lease.item


def test_an_item_larger_than_the_bound_is_admitted_alone_and_not_overtaken():
    channel: Channel[str] = Channel(100)
    channel.put("small", ["1"], 10)
    big = _thread(lambda: channel.put("big", ["2"], 500))
    _wait_until(lambda: len(channel._turns) == 1)
    later = _thread(lambda: channel.put("later", ["3"], 10))
    _wait_until(lambda: len(channel._turns) == 2)
    assert channel.meters().items_put == 1
    order = []
    for _ in range(3):
        lease = channel.lease()
        assert lease is not None
        order.append(lease.item)
        lease.release()
    assert order == ["small", "big", "later"]
    big.join(5)
    later.join(5)
    assert channel.meters().peak_bytes == 500


def test_who_keeps_what_it_has_until_the_next_comes_gets_it_beyond_the_bound():
    channel: Channel[int] = Channel(100)
    producer = _thread(lambda: [channel.put(i, [f"s{i}"], 60) for i in range(4)])
    kept = [channel.lease(keeps=True, timeout=5) for _ in range(3)]
    assert [lease.item for lease in kept if lease is not None] == [0, 1, 2]
    with pytest.raises(TimeoutError):
        channel.lease(timeout=0.1)
    assert channel.meters().items_put == 3, "none is let in for who may release what it has"
    for lease in kept:
        assert lease is not None
        lease.release()
    producer.join(5)
    assert channel.meters().items_put == 4


@pytest.mark.parametrize("how", ["fail", "close"])
def test_every_waiter_is_woken_within_a_second(how: str):
    full: Channel[int] = Channel(10)
    full.put(0, ["0"], 10)
    empty: Channel[int] = Channel(10)
    outcomes: list[object] = []

    def put() -> None:
        try:
            full.put(1, ["1"], 10)
        except (ChannelFailed, ChannelClosed) as error:
            outcomes.append(error)

    def lease() -> None:
        try:
            outcomes.append(empty.lease())
        except ChannelFailed as error:
            outcomes.append(error)

    threads = [_thread(put) for _ in range(3)] + [_thread(lease) for _ in range(3)]
    _wait_until(lambda: len(full._turns) == 3 and empty._lease_wait._waiters == 3)
    start = time.monotonic()
    cause = OSError(5, "the store is gone")
    for channel in (full, empty):
        if how == "fail":
            channel.fail(cause)
            channel.fail(RuntimeError("a later one"))
        else:
            channel.close()
    for thread in threads:
        thread.join(5)
    assert time.monotonic() - start < 1.0
    assert len(outcomes) == 6
    if how == "fail":
        assert all(isinstance(o, ChannelFailed) and o.__cause__ is cause for o in outcomes)
        with pytest.raises(ChannelFailed, match="the store is gone"):
            full.lease()
        with pytest.raises(ChannelFailed):
            empty.put(1, ["1"], 1)
    else:
        assert outcomes.count(None) == 3
        assert sum(isinstance(o, ChannelClosed) for o in outcomes) == 3
        assert full.meters().items_put == 1


def test_commit_is_strict_and_allowed_after_a_failure():
    channel: Channel[int] = Channel(100)
    channel.put(0, ["a", "b"], 1)
    channel.lease("left")
    for wrong, consumer in ((["c"], "left"), (["a"], "right"), (["a", "a"], "left")):
        with pytest.raises(ValueError, match="does not hold"):
            channel.commit(wrong, consumer)
    channel.fail(RuntimeError("x"))
    channel.commit(["b"], "left")
    with pytest.raises(ValueError, match="does not hold"):
        channel.commit(["b"], "left")
    assert channel.uncommitted("left") == ("a",)
    assert channel.meters().samples_committed == 1


def test_what_a_dead_consumer_held_goes_back_with_its_count():
    channel: Channel[int] = Channel(100)
    for round_ in (1, 2):
        channel.put(0, ["a", "b"], 60)
        channel.put(1, ["c"], 30)
        lease = channel.lease("dead")
        assert lease is not None
        channel.lease("dead")
        if round_ == 1:
            lease.release()
            channel.commit(["b"], "dead")
        expected = ("a", "c") if round_ == 1 else ("a", "b", "c")
        assert channel.uncommitted() == channel.uncommitted("dead") == expected
        counts = {"a": round_, "b": round_ - 1, "c": round_}
        assert channel.abandon("dead") == tuple((key, counts[key]) for key in expected)
        assert channel.meters().bytes_held == 0
        assert channel.uncommitted() == ()
    assert channel.abandon("dead") == ()


def test_waits_are_metered_while_they_last():
    channel: Channel[int] = Channel(10)
    _thread(channel.lease)
    _thread(channel.lease)
    time.sleep(0.2)
    assert channel.meters().lease_wait > 0.3
    assert channel.meters().put_wait == 0
    channel.close()


@settings(max_examples=40, deadline=None)
@given(
    bound=st.integers(1, 60),
    sizes=st.lists(st.integers(0, 80), max_size=40),
    producers=st.integers(1, 4),
    consumers=st.integers(1, 4),
    dies_after=st.none() | st.integers(0, 5),
)
def test_nothing_is_lost_doubled_or_over_the_bound(bound, sizes, producers, consumers, dies_after):
    """Threads on both sides; one consumer may die holding leases, its samples are made again."""
    channel: Channel[int] = Channel(bound)
    committed: list[str] = []
    dead = threading.Event()
    over = []

    def produce(mine: list[int]) -> None:
        for i in mine:
            channel.put(i, [f"{i}"], sizes[i])

    def consume(name: str) -> None:
        for count, lease in enumerate(channel.leases(name)):
            held = channel.meters().bytes_held
            if held > bound and held not in sizes:
                over.append(held)
            if name == "c0" and count == dies_after:
                dead.set()
                return
            lease.release()
            channel.commit(lease.sample_ids, name)
            committed.extend(lease.sample_ids)

    makers = [
        _thread(lambda p=p: produce(list(range(p, len(sizes), producers))))
        for p in range(producers)
    ]
    users = [_thread(lambda c=c: consume(f"c{c}")) for c in range(consumers)]

    def end() -> bool:
        return not any(m.is_alive() for m in makers)

    deadline = time.monotonic() + 10
    while not end() or channel.meters().items_queued or channel.uncommitted():
        assert time.monotonic() < deadline, channel.meters()
        if dead.is_set():
            dead.clear()
            users.append(_thread(lambda: consume("again")))
            for key, times in channel.abandon("c0"):
                assert times == 1
                channel.put(int(key), [key], sizes[int(key)])
        time.sleep(0.0005)
    channel.close()
    for user in users:
        user.join(5)
    assert not over
    assert Counter(committed) == Counter(str(i) for i in range(len(sizes)))
    meters = channel.meters()
    assert (meters.bytes_held, meters.samples_uncommitted) == (0, 0)
    assert meters.samples_committed == len(sizes)
    assert meters.peak_bytes <= max([bound, *sizes])


def test_as_many_items_as_are_allowed_are_held_however_small():
    channel = Channel(1000, 2)
    channel.put("a", ["a"], 1)
    channel.put("b", ["b"], 1)
    came = threading.Thread(target=channel.put, args=("c", ["c"], 1))
    came.start()
    lease = channel.lease()
    came.join(0.2)
    assert came.is_alive(), "what is leased is held"
    assert channel.meters().bytes_held == 2
    lease.release()
    came.join(5)
    assert not came.is_alive()
