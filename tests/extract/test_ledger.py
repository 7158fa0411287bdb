import random
import shutil
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extract_runs import make_samples
from paceline.durable.errors import DataError
from paceline.durable.journal import Journal
from paceline.durable.store import MemoryStore, Stat
from paceline.extract import ledger
from paceline.extract.ledger import is_intact, recorded, survey, verified_record
from paceline.features.header import read_header
from paceline.features.manifest import Manifest, UnitEntry
from paceline.types import LayerConvention
from unit_stores import (
    FINGERPRINT,
    HIDDEN,
    LAYERS,
    flipped,
    make_world,
    other_lengths,
    other_mask,
    other_tokens,
)

OTHER = "0" * 32


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """A complete store, and its units' sizes and checksums."""
    world = make_world(tmp_path_factory.mktemp("full"), make_samples(60))
    return world, world.write_all()


@pytest.fixture
def world(full, tmp_path):
    """A copy to spoil."""
    shutil.copytree(full[0].source.parent, tmp_path / "world")
    return make_world(tmp_path / "world", make_samples(60))


@pytest.fixture
def stats(full):
    return full[1]


def look(world, records, **more):
    return survey(
        records, world.store, world.units, world.rows, FINGERPRINT, source=world.source, **more
    )


def spoil(world, stats, kind, index):
    path = world.path(index)
    data = path.read_bytes() if path.exists() else b""
    match kind:
        case "zero":
            path.write_bytes(b"")
        case "half":
            path.write_bytes(data[: len(data) // 2])
        case "short":
            path.write_bytes(data[:-1])
        case "long":
            path.write_bytes(data + b"\0")
        case "other tokens":
            world.write(index, change=other_tokens)
        case "other fingerprint":
            world.write(index, fingerprint=OTHER)
        case "other states":
            world.write(index, seed=1)
        case "header":
            path.write_bytes(flipped(data, 8 * 100))
        case "gone":
            path.unlink()
        case "foreign":
            path.write_bytes(b"mine" * 100)


REASONS = {
    "zero": "empty",
    "half": "torn or damaged (",
    "short": "torn or damaged (",
    "long": "torn or damaged (",
    "header": "torn or damaged (",
    "foreign": "torn or damaged (",
    "other tokens": "not the one that was recorded",
    "other states": "not the one that was recorded",
    "other fingerprint": f"made by another extraction (fingerprint {OTHER})",
    "gone": "recorded as done, but gone",
}


@pytest.mark.parametrize("deep", [False, True])
def test_t_43_what_proves_nothing_is_redone_and_says_why(world, stats, deep):
    assert len(world.units) > len(REASONS) + 2
    for index, kind in enumerate(REASONS, start=1):
        spoil(world, stats, kind, index)
    found = look(world, world.verified(stats), deep=deep)
    spoiled = set(range(1, len(REASONS) + 1))
    assert found.done == {i: s for i, s in stats.items() if i not in spoiled}
    assert found.redo.keys() == {world.units[i].key for i in spoiled}
    for index, (kind, reason) in enumerate(REASONS.items(), start=1):
        assert found.redo[world.units[index].key].startswith(reason), kind
    assert not found.adopted
    assert not found.staged


UNRECORDED = {
    **REASONS,
    "other tokens": "not recorded, and made of other token ids than the corpus has",
}


@pytest.mark.parametrize("deep", [False, True])
def test_t_43_without_a_journal_whole_and_right_units_are_adopted_and_no_others(world, stats, deep):
    kinds = [kind for kind in REASONS if kind not in ("gone", "other states")]
    for index, kind in enumerate(kinds, start=1):
        spoil(world, stats, kind, index)
    found = look(world, [], deep=deep)
    spoiled = set(range(1, len(kinds) + 1))
    assert found.done == found.adopted == {i: s for i, s in stats.items() if i not in spoiled}
    assert found.redo.keys() == {world.units[i].key for i in spoiled}
    for index, kind in enumerate(kinds, start=1):
        assert found.redo[world.units[index].key].startswith(UNRECORDED[kind]), kind


def test_a_unit_of_another_machine_counts_and_is_adopted(world, stats):
    mine = {i: s for i, s in stats.items() if i % 2}
    found = look(world, world.verified(mine))
    assert found.done == stats
    assert found.adopted == {i: s for i, s in stats.items() if not i % 2}
    recorded_now = [*world.verified(mine), *world.verified(found.adopted)]
    assert not look(world, recorded_now).adopted


@pytest.mark.parametrize("change", [other_tokens, other_lengths, other_mask])
def test_an_unrecorded_shard_of_other_tokens_is_not_adopted(world, change):
    world.write(0, change=change)
    found = look(world, [])
    assert found.redo == {
        world.units[0].key: "not recorded, and made of other token ids than the corpus has"
    }


def test_an_unrecorded_shard_of_other_samples_is_not_adopted(world):
    ids = world.rows.sample_ids.take(world.units[0].samples)
    world.write(0, sample_ids=tuple(reversed(ids)))
    assert "made of other samples" in look(world, []).redo[world.units[0].key]


def test_token_ids_are_compared_with_the_bytes_and_not_with_a_checksum_alone(world):
    """A payload that was damaged where the ids lie is seen without reading the rest."""
    path = world.path(0)
    data = path.read_bytes()
    header = read_header(world.store, path.name, len(data))
    path.write_bytes(flipped(data, 8 * header.entries["input_ids"].start))
    assert look(world, []).redo[world.units[0].key].startswith("torn or damaged (all ")


def test_a_flipped_bit_of_the_hidden_states_is_seen_by_the_deep_look(world, stats):
    path = world.path(3)
    data = path.read_bytes()
    path.write_bytes(flipped(data, 8 * (len(data) - 300)))
    for records in (world.verified(stats), []):
        assert 3 in look(world, records).done
        found = look(world, records, deep=True)
        assert found.redo == {
            world.units[3].key: f"torn or damaged (all {len(data)} bytes are there, a checksum "
            "does not hold)"
        }


@pytest.mark.parametrize("field", ["size", "crc64"])
def test_a_unit_recorded_with_another_size_or_checksum_is_redone(world, stats, field):
    wrong = dict(stats)
    size, crc = stats[2].size, stats[2].crc64
    wrong[2] = Stat(size + 1, crc) if field == "size" else Stat(size, crc ^ 1)
    found = look(world, world.verified(wrong))
    assert found.redo == {world.units[2].key: "not the one that was recorded"}


def test_records_of_another_extraction_count_for_nothing(world, stats):
    records = [{**r, "fingerprint": OTHER} for r in world.verified({1: Stat(1, 1)})]
    assert look(world, records).adopted == stats


def test_the_last_record_of_a_unit_stands(world, stats):
    records = [*world.verified({0: Stat(9, 9)}), *world.verified(stats)]
    assert look(world, records).done == stats


def test_what_waits_in_staging_is_told_unless_it_is_in_the_store(world, stats):
    staged = [{**r, "kind": "staged"} for r in world.verified(stats)]
    world.path(1).unlink()
    found = look(world, staged)
    assert found.staged == {world.units[1].key: stats[1]}
    assert found.adopted == {i: s for i, s in stats.items() if i != 1}
    assert not found.redo


def test_foreign_objects_are_told_and_left(world, stats):
    (world.path(0).with_name("unit-999999.safetensors")).write_bytes(b"mine")
    assert look(world, world.verified(stats)).foreign == ("unit-999999.safetensors",)


def test_any_store_will_do_and_each_object_is_looked_at_alone(world, stats):
    reads = []

    class Counting(MemoryStore):
        def list(self, prefix, after=""):
            reads.append("list")
            return super().list(prefix, after)

        def get_range(self, key, start, end):
            reads.append(key)
            return super().get_range(key, start, end)

    memory = Counting()
    for unit in world.units:
        memory.put(unit.key, world.store.path(unit.key))
    found = survey(
        world.verified(stats), memory, world.units, world.rows, FINGERPRINT,
        source=world.source,
    )  # fmt: skip
    assert found.done == stats
    assert sorted(reads) == sorted(["list", *(unit.key for unit in world.units)])


def test_a_store_that_fails_is_an_error_and_no_reason_to_redo(world, stats, monkeypatch):
    def fail(key, start, end):
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(world.store, "get_range", fail)
    with pytest.raises(OSError, match="Stale"):
        look(world, world.verified(stats))
    bad_block = OSError(5, "Input/output error")
    monkeypatch.setattr(world.store, "get_range", lambda *_: (_ for _ in ()).throw(bad_block))
    found = look(world, world.verified(stats))
    assert set(found.redo.values()) == {"cannot be read (Input/output error)"}


def test_a_corpus_that_changed_is_refused(world):
    lines = world.source.read_bytes().splitlines(keepends=True)
    world.source.write_bytes(b"".join([lines[1], lines[0], *lines[2:]]))
    with pytest.raises(DataError, match=r"corpus\.jsonl"):
        look(world, [])


def test_failures_are_remembered_until_the_unit_is_verified(world, stats):
    key = world.units[4].key
    tries = [
        {"kind": "failed", "key": key, "fingerprint": FINGERPRINT, "reason": "died"},
        {"kind": "failed", "key": key, "fingerprint": FINGERPRINT, "reason": "died again"},
        {"kind": "quarantined", "key": key, "fingerprint": FINGERPRINT, "reason": "twice"},
        {"kind": "session", "session": 1},
        {"kind": "quarantined", "key": key, "fingerprint": OTHER, "reason": "not ours"},
    ]
    said = recorded(tries, FINGERPRINT)
    assert said.failed == {key: ("died", "died again")}
    assert said.quarantined == {key: "twice"}
    said = recorded([*tries, *world.verified(stats)], FINGERPRINT)
    assert not said.failed
    assert not said.quarantined
    assert said.verified[key] == stats[4]


def test_a_record_is_what_the_survey_reads(world, stats, tmp_path):
    with Journal(tmp_path / "journal.jsonl") as journal:
        journal.append(verified_record(world.units[0], stats[0], FINGERPRINT))
        assert recorded(journal.records, FINGERPRINT).verified == {world.units[0].key: stats[0]}


def manifest_of(world, stats):
    return Manifest(
        fingerprint=FINGERPRINT,
        target_identity="t",
        hidden_size=HIDDEN,
        layer_ids=LAYERS,
        layer_convention=LayerConvention.OUTPUT_AFTER_LAYER,
        last=False,
        dtype="bfloat16",
        units=tuple(
            UnitEntry(
                key=unit.key,
                size=stats[unit.index].size,
                crc64=f"{stats[unit.index].crc64:016x}",
                sample_ids=world.rows.sample_ids.take(unit.samples),
                lengths=tuple(world.rows.lengths[list(unit.samples)].tolist()),
                loss_tokens=tuple(world.rows.loss_tokens[list(unit.samples)].tolist()),
            )
            for unit in world.units
        ),
    )


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("kind", REASONS)
def test_a_published_store_is_intact_until_one_object_is_not(world, stats, kind, deep):
    manifest = manifest_of(world, stats)
    assert is_intact(manifest, world.store, deep=deep)
    spoil(world, stats, kind, 5)
    assert not is_intact(manifest, world.store, deep=deep)


def test_only_the_deep_look_at_a_published_store_reads_its_hidden_states(world, stats):
    path = world.path(3)
    path.write_bytes(flipped(path.read_bytes(), 8 * (stats[3].size - 300)))
    assert is_intact(manifest_of(world, stats), world.store)
    assert not is_intact(manifest_of(world, stats), world.store, deep=True)


DAMAGE = st.lists(
    st.tuples(
        st.integers(0, 10**6),
        st.sampled_from(["cut", "flip", "gone", "swap", "extend", "other", *REASONS]),
        st.integers(0, 10**6),
    ),
    min_size=1,
    max_size=8,
)


def bytes_of(world):
    return {u.index: world.path(u.index).read_bytes() for u in world.units}


@pytest.fixture(scope="module")
def arena(tmp_path_factory):
    """A store to spoil again and again; whole bytes of its units, and as good ones."""
    world = make_world(tmp_path_factory.mktemp("arena"), make_samples(60))
    stats = world.write_all()
    whole = bytes_of(world)
    for unit in world.units:
        world.write(unit.index, seed=1)
    return world, stats, whole, bytes_of(world)


@settings(max_examples=150, deadline=None)
@given(damage=DAMAGE, kept=st.integers(0, 2**20 - 1))
def test_no_damage_makes_a_bad_unit_count_as_done(arena, damage, kept):
    world, stats, whole, others = arena
    for index, data in whole.items():
        world.path(index).write_bytes(data)
    for at, kind, number in damage:
        index = at % len(world.units)
        path = world.path(index)
        data = path.read_bytes() if path.exists() else b""
        if kind == "cut" and data:
            path.write_bytes(data[: number % len(data)])
        elif kind == "flip" and data:
            path.write_bytes(flipped(data, number % (8 * len(data))))
        elif kind == "extend":
            path.write_bytes(data + random.Random(number).randbytes(1 + number % 50))
        elif kind == "swap":
            path.write_bytes(whole[number % len(world.units)])
        elif path.exists():
            spoil(world, stats, kind, index)
    now = {i: world.path(i).read_bytes() if world.path(i).exists() else b"" for i in whole}
    known = {i: s for i, s in stats.items() if kept >> i & 1}
    found = look(world, world.verified(known), deep=True)
    for index in whole:
        # Without a record, other states of the same tokens are as good.
        good = [whole[index]] if index in known else [whole[index], others[index]]
        assert (index in found.done) == (now[index] in good)
    quick = look(world, world.verified(known))
    assert set(found.done) <= set(quick.done)


def test_the_ledger_knows_no_torch():
    program = "import sys, paceline.extract.ledger; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_deep_look_needs_no_more_than_a_block_at_a_time(world, stats, monkeypatch):
    monkeypatch.setattr(ledger, "_BLOCK", 100)
    assert look(world, world.verified(stats), deep=True).done == stats
