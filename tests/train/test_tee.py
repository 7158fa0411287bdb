"""What an online training keeps of what it captures: whole or absent, and never in its way."""

import errno
import random
import threading
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.durable.errors import ShardDamaged
from paceline.durable.fs import RealFileSystem
from paceline.durable.space import Space
from paceline.train.agenda import Agenda
from paceline.train.batches import Batches, OnlineSamples
from paceline.train.tee import JOURNAL, Tee, TeePlace, open_tee
from paceline.types import Features, TokenBatch

IDS = tuple(f"{n:032x}" for n in range(40))

SHARD = 15
"""More samples than a shard has."""


def sample(number: int, *, hidden: int = 8) -> Features:
    """3 to 9 tokens, with `last`."""
    rows = 3 + number % 7
    generator = torch.Generator().manual_seed(number)
    return Features(
        tokens=TokenBatch(
            input_ids=torch.arange(rows) + number,
            loss_mask=torch.arange(rows) > 1,
            offsets=torch.tensor([0, rows]),
            sample_ids=(IDS[number],),
        ),
        taps=torch.randn(rows, 2, hidden, generator=generator),
        last=torch.randn(rows, hidden, generator=generator),
        layer_ids=(1, 3),
    )


def same(one: Features, other: Features) -> bool:
    assert one.last is not None
    assert other.last is not None
    return (
        torch.equal(one.taps, other.taps)
        and torch.equal(one.last, other.last)
        and torch.equal(one.tokens.input_ids, other.tokens.input_ids)
        and torch.equal(one.tokens.loss_mask, other.tokens.loss_mask)
        and one.tokens.sample_ids == other.tokens.sample_ids
    )


@pytest.fixture
def place(tmp_path) -> TeePlace:
    """Where a shard has about ten samples."""
    return TeePlace(
        folder=tmp_path / "tee",
        fingerprint="f" * 32,
        codec="none",
        shard_bytes=6_000,
        waiting_bytes=1 << 20,
    )


def filled(place: TeePlace, numbers: range = range(len(IDS)), **options) -> Tee:
    tee = Tee(place, IDS, **options)
    for number in numbers:
        tee.offer(number, sample(number))
    return tee


@pytest.mark.parametrize("codec", ["none", "planes"])
def test_what_is_kept_is_what_was_captured_before_and_after_a_restart(place, codec):
    place = replace(place, codec=codec)
    tee = filled(place)
    assert all(tee.has(n) and same(tee.read(n), sample(n)) for n in range(len(IDS)))
    tee.close()
    assert len(list(place.folder.glob("tee-*"))) > 2
    again = Tee(place, IDS)
    assert len(again) == len(IDS)
    assert all(same(again.read(n), sample(n)) for n in range(len(IDS)))
    again.close()


def test_the_caller_may_write_over_what_it_has_offered(place):
    tee = Tee(place, IDS)
    mine = sample(3)
    tee.offer(3, mine)
    mine.taps.zero_()
    assert same(tee.read(3), sample(3))
    tee.close()


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_whatever_a_kill_leaves_nothing_is_read_that_was_not_captured(tmp_path_factory, data):
    """Any file of the folder is cut, flipped, emptied or gone: the rest is read as it was."""
    folder = tmp_path_factory.mktemp("tee")
    place = TeePlace(
        folder=folder, fingerprint="f", codec="none", shard_bytes=6_000, waiting_bytes=1 << 20
    )
    filled(place).close()
    victim = data.draw(st.sampled_from(sorted(folder.iterdir())))
    content = bytearray(victim.read_bytes())
    how = data.draw(st.sampled_from(["cut", "flip", "empty", "gone"]))
    if how == "gone":
        victim.unlink()
    else:
        at = data.draw(st.integers(0, len(content) - 1))
        if how == "flip":
            content[at] ^= 1 << data.draw(st.integers(0, 7))
        victim.write_bytes({"cut": content[:at], "flip": content, "empty": b""}[how])
    tee = Tee(place, IDS)
    try:
        lost = 0
        for number in range(len(IDS)):
            if not tee.has(number):
                lost += 1
                continue
            try:
                assert same(tee.read(number), sample(number))
            except (ShardDamaged, KeyError):
                lost += 1
                tee.forget(number)
                assert not tee.has(number)
        assert lost <= len(IDS) if victim.name == JOURNAL else lost < len(IDS)
        for number in range(len(IDS)):
            tee.offer(number, sample(number))
        assert all(same(tee.read(n), sample(n)) for n in range(len(IDS)))
    finally:
        tee.close()
    known = Tee(place, IDS)
    assert len(known) == len(IDS)
    known.close()


def test_shards_of_other_features_are_removed(place):
    filled(place).close()
    other = Tee(replace(place, fingerprint="0" * 32), IDS)
    assert len(other) == 0
    assert not list(place.folder.glob("tee-*"))
    other.close()


def test_two_offers_of_one_sample_at_a_time_keep_one(place):
    tee = Tee(place, IDS)
    ready = threading.Barrier(4)

    def offer() -> None:
        ready.wait()
        for number in range(20):
            tee.offer(number, sample(number))

    threads = [threading.Thread(target=offer) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tee.close()
    again = Tee(place, IDS)
    assert len(again) == 20
    assert all(same(again.read(n), sample(n)) for n in range(20))
    again.close()


class FullDisk(RealFileSystem):
    """Takes nothing as long as `is_full`."""

    def __init__(self) -> None:
        self.is_full = True

    def write(self, file, data) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device", file.name)
        super().write(file, data)


@pytest.mark.parametrize("reserve", [0, 1000])
def test_a_full_disk_costs_what_is_kept_and_nothing_else(place, reserve, caplog):
    disk, now = FullDisk(), [0.0]
    place = replace(place, reserve=reserve)
    tee = filled(place, fs=disk, clock=lambda: now[0])
    eventually(lambda: not tee.has(0) and len(tee) < SHARD)
    tee.offer(0, sample(0))
    assert not tee.has(0), "while it rests nothing is copied"
    disk.is_full, now[0] = False, 100.0
    for number in range(len(IDS)):
        tee.offer(number, sample(number))
    tee.close()
    assert "No space left" in tee.sentence()
    assert sum("captured again" in r.message for r in caplog.records) == 1
    assert len(Tee(place, IDS)) == len(IDS)
    assert not list(place.folder.glob("*.partial"))


def test_checkpoints_find_room(place):
    """What is kept leaves the reserve free."""
    free = [100_000]

    def space(_: Path) -> Space:
        return Space(total=10_000_000, used=0, free=free[0])

    tee = filled(replace(place, reserve=200_000), read=space)
    eventually(lambda: not tee.has(0) and len(tee) < SHARD)
    assert "200.00 kB of that for checkpoints" in tee.sentence()
    assert not list(place.folder.glob("tee-*"))
    tee.close()


def test_a_disk_that_does_not_answer_does_not_hold_up_who_offers(place):
    answers = threading.Event()

    class Hanging(RealFileSystem):
        def sync(self, file) -> None:
            if "tee-" in file.name:
                answers.wait(20)
            super().sync(file)

    tee = filled(replace(place, waiting_bytes=3_000), fs=Hanging())
    assert 0 < len(tee) < len(IDS)
    assert "faster than they can be written" in tee.sentence()
    answers.set()
    tee.close()
    assert len(Tee(place, IDS)) == len(tee)


def test_a_folder_that_cannot_be_made_costs_the_tee_alone(place, caplog):
    place.folder.write_text("a file")
    with open_tee(place, IDS) as tee:
        assert tee is None
    assert "goes on without it" in caplog.text


class Kept(NamedTuple):
    batches: Batches
    agenda: Agenda
    kept: set[int]


def batches(consumed: int = 0, *, samples: int = 20, epochs: int = 3) -> Kept:
    kept: set[int] = set()
    agenda = Agenda(consumed=consumed, owed=(), end=samples * epochs)
    asked = OnlineSamples(
        lines=torch.arange(samples).numpy(),
        tokens=torch.full((samples,), 10, dtype=torch.int32).numpy(),
        sample_of=lambda position: position % samples,
        ids=IDS[:samples],
        batch_tokens=40,
    )
    return Kept(Batches(asked, agenda, kept.__contains__), agenda, kept)


@settings(max_examples=20, deadline=None)
@given(samples=st.integers(1, 20), targets=st.integers(1, 3), seed=st.integers(0, 99))
def test_every_position_is_handed_out_once_and_each_sample_captured_once(samples, targets, seed):
    """With any number of targets beside a reader, and whatever is lost and captured again."""
    side, agenda, kept = batches(samples=samples, epochs=3)
    done: list[int] = []
    captured: list[int] = []
    lock, chance = threading.Lock(), random.Random(seed)

    def capture() -> None:
        while not agenda.is_closed:
            batch = side.to_capture(0.01)
            if batch is None:
                continue
            with lock:
                is_lost = chance.random() < 0.2
            if is_lost:
                side.again(batch)
                continue
            for position in batch:
                with lock:
                    captured.append(position % samples)
                    kept.add(position % samples)
                    done.append(position)
                side.captured(position)
                agenda.consume([position])

    def read() -> None:
        while (position := side.to_read()) is not None:
            with lock:
                done.append(position)
            agenda.consume([position])

    threads = [threading.Thread(target=capture) for _ in range(targets)]
    threads.append(threading.Thread(target=read))
    for thread in threads:
        thread.start()
    eventually(lambda: agenda.consumed == 3 * samples)
    agenda.close()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert sorted(done) == list(range(3 * samples))
    assert sorted(captured) == list(range(samples))


def test_a_sample_that_is_set_aside_stays_so_and_counts():
    side, agenda, _ = batches(samples=1, epochs=3)
    named = None
    for _ in range(4):
        batch = side.to_capture()
        assert batch == (0,)
        named = side.failed(batch)
    assert named == IDS[0]
    assert side.to_capture() is None
    assert agenda.consumed == 3
    assert side.given_up == 1


def eventually(holds) -> None:
    for _ in range(100):
        if holds():
            return
        threading.Event().wait(0.05)
    raise AssertionError("it does not come about")
