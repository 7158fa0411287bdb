import json
from contextlib import suppress
from errno import ENOSPC
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extract_runs import make_samples
from feature_runs import make_feature_run
from paceline.durable.crash import Crashed, CrashFs, FaultyFs
from paceline.durable.errors import IntegrityError, UserError
from paceline.durable.fs import REAL_FS
from paceline.durable.journal import Journal, fold
from paceline.extract.inventory import (
    inventory_json,
    look,
    open_subject,
    read_papers,
    take_inventory,
    unproven_ids,
)
from paceline.extract.layout import JOURNAL, read_layout
from paceline.extract.repair import repair
from paceline.features import manifest as manifests
from paceline.recipe.run_dir import RunDir
from paceline.types.row_index import FILE_NAME, open_rows
from unit_stores import HIDDEN, flipped


@pytest.fixture
def made(tmp_path):
    return make_feature_run(tmp_path / "run", make_samples(60))


def inventory(made, *, deep=False):
    subject = open_subject(made.run_dir)
    papers = read_papers(subject)
    found = look(subject, papers, deep=deep)
    return subject, take_inventory(subject, papers, found, is_deep=deep)


def mend(made):
    subject = open_subject(made.run_dir)
    papers = read_papers(subject)
    found = look(subject, papers, deep=False)
    before = take_inventory(subject, papers, found, is_deep=False)
    return repair(subject, papers, found, publish=not before.is_published)


def test_a_finished_extraction_is_whole(made):
    stats = made.finish()
    _, found = inventory(made)
    assert found.is_whole
    assert (found.verified, found.units) == (len(stats), len(made.world.units))
    assert found.bytes == sum(s.size for s in stats.values())
    assert found.verified_samples == found.samples == len(made.world.rows)
    (whole,) = found.ranges
    assert (whole.first, whole.last, whole.state) == (0, len(stats) - 1, "verified")


def test_incident_three_missing_samples_are_named(made):
    made.finish()
    made.world.path(4).unlink()
    subject, found = inventory(made)
    unit = made.world.units[4]
    assert [(r.first, r.last, r.state) for r in found.ranges] == [
        (0, 3, "verified"),
        (4, 4, "missing"),
        (5, len(made.world.units) - 1, "verified"),
    ]
    missing = found.ranges[1]
    assert missing.reason == "recorded as done, but gone"
    ids = made.world.rows.sample_ids[unit.start : unit.stop]
    assert tuple(unproven_ids(found, subject.rows)) == ids
    told = json.loads(inventory_json(found, subject.rows))
    assert told["ranges"][1]["sample_ids"] == list(ids)
    assert "sample_ids" not in told["ranges"][0]
    assert (told["missing"], told["is_whole"]) == (1, False)


def test_ranges_merge_what_stands_alike_and_cover_the_plan(made):
    made.write([0, 1, 2, 5, 6, 7, 8])
    for index in (5, 6):
        made.world.path(index).write_bytes(made.world.path(index).read_bytes()[:-index])
    made.world.path(7).write_bytes(b"")
    _, found = inventory(made)
    assert [(r.first, r.last, r.state, r.reason.split(" (")[0]) for r in found.ranges] == [
        (0, 2, "verified", ""),
        (3, 4, "missing", ""),
        (5, 6, "bad", "torn or damaged"),
        (7, 7, "bad", "empty"),
        (8, 8, "verified", ""),
        (9, len(made.world.units) - 1, "missing", ""),
    ]
    assert found.ranges[0].start == 0
    assert found.ranges[-1].stop == len(made.world.rows)
    assert all(a.stop == b.start for a, b in zip(found.ranges, found.ranges[1:], strict=False))
    assert found.verified + found.missing + found.bad + found.quarantined == found.units


def test_what_failed_earlier_is_listed_with_its_reason(made):
    made.write([0, 1])
    with Journal(made.journal) as journal:
        for kind, unit, reason in (
            ("failed", 1, "before it was verified again"),
            ("failed", 3, "worker died"),
            ("failed", 3, "worker died again"),
            ("quarantined", 3, "2 deaths"),
            ("failed", 4, "no answer"),
        ):
            key, print_ = made.world.units[unit].key, made.record.fingerprint
            record = {"kind": kind, "key": key, "fingerprint": print_, "reason": reason}
            journal.append(record)
        journal.append(made.world.verified({1: made.world.write(1)})[0])
    _, found = inventory(made)
    assert [(f.key[-15:-12], f.attempts, f.reason) for f in found.failed] == [
        ("003", 2, "worker died again"),
        ("004", 1, "no answer"),
    ]
    assert found.quarantined == 1
    assert ("quarantined", "2 deaths") in [(r.state, r.reason) for r in found.ranges]


def test_a_shard_on_its_way_is_missing_and_said_to_be_made(made):
    stat = made.world.write(0)
    made.world.path(0).unlink()
    with Journal(made.journal) as journal:
        journal.append({**made.world.verified({0: stat})[0], "kind": "staged"})
    assert inventory(made)[1].ranges[0].reason == "made, but not yet in the store"


def test_only_the_deep_look_reads_every_byte(made):
    made.finish()
    path = made.world.path(2)
    path.write_bytes(flipped(path.read_bytes(), 8 * (path.stat().st_size - 200)))
    assert inventory(made)[1].is_whole
    _, found = inventory(made, deep=True)
    assert (found.bad, found.is_whole, found.is_deep) == (1, False, True)


def test_nothing_to_look_at_is_said(made, tmp_path):
    with pytest.raises(UserError, match="no extraction has begun"):
        open_subject(RunDir(tmp_path / "elsewhere"))
    made.run_dir.prepared.write_bytes(made.run_dir.prepared.read_bytes()[:-1])
    with pytest.raises(UserError, match="not the corpus that these features were made of"):
        open_subject(made.run_dir)


def test_the_index_spares_reading_the_corpus_and_a_manifest_the_target(made, monkeypatch):
    made.finish()
    digest = made.fields["corpus"]
    index = made.run_dir.features / FILE_NAME
    open_rows(made.run_dir.prepared, digest, vocab_size=300, max_position=99, index=index)
    monkeypatch.setattr("paceline.extract.inventory.index_rows", None)
    monkeypatch.setattr("paceline.extract.inventory.ModelFolder", None)
    assert inventory(made)[1].is_whole


def test_a_store_elsewhere_is_found_below_the_fingerprint(tmp_path):
    made = make_feature_run(tmp_path / "run", make_samples(60), store=str(tmp_path / "far"))
    made.write()
    assert inventory(made)[1].verified == len(made.world.units)
    assert mend(made)[0].endswith(f"with {len(made.world.units)} shards.")
    place = tmp_path / "far" / made.record.fingerprint
    assert manifests.load(made.run_dir.features).store == place.as_uri()
    assert (place / "manifest.json").read_bytes() == made.manifest.read_bytes()
    assert inventory(made)[1].is_whole


def spoil_journal(made):
    lines = made.journal.read_bytes().splitlines(keepends=True)
    lines[2] = flipped(lines[2], 8 * 30)
    made.journal.write_bytes(b"".join(lines))
    return made.journal.read_bytes()


def test_a_damaged_journal_is_told_and_mended_from_the_store(made):
    stats = made.write([0, 1, 2, 3, 4])
    with Journal(made.journal) as journal:
        failed = {"kind": "failed", "key": made.world.units[6].key, "reason": "why"}
        journal.append({**failed, "fingerprint": made.record.fingerprint})
    made.world.path(3).write_bytes(b"")
    damaged = spoil_journal(made)
    _, found = inventory(made)
    assert found.problems == (f"{made.journal}, line 3 is unreadable, and good records follow it.",)
    assert (found.verified, found.bad) == (4, 1)
    (line,) = mend(made)
    assert "written anew, with 4 shards that the store proves." in line
    (kept,) = made.run_dir.features.glob("journal.damaged-*.jsonl")
    assert kept.read_bytes() == damaged
    records = fold(made.journal.read_bytes(), made.journal).records
    verified = [r for r in records if r["kind"] == "verified"]
    wanted = made.world.verified({i: s for i, s in stats.items() if i != 3})
    assert [{k: v for k, v in r.items() if k not in ("v", "seq")} for r in verified] == wanted
    assert [r["reason"] for r in records if r["kind"] == "failed"] == ["why"]
    assert made.world.path(3).read_bytes() == b"", "what is bad is left to be redone"
    assert inventory(made)[1].problems == ()
    assert mend(made) == ()


def test_a_lost_journal_is_told_and_mended(made):
    made.write([0, 1])
    made.journal.unlink()
    assert "no such file" in inventory(made)[1].problems[0]
    mend(made)
    assert len(fold(made.journal.read_bytes(), made.journal).records) == 2
    assert not list(made.run_dir.features.glob("journal.damaged-*"))


def test_a_journal_of_another_version_is_refused(made):
    with Journal(made.journal) as journal:
        journal.append({"kind": "x"})
    text = made.journal.read_bytes().replace(b'"v":1', b'"v":9')
    body = text[9:-1]
    made.journal.write_bytes(b"%08x %s\n" % (crc32(body), body))
    with pytest.raises(IntegrityError, match="format version"):
        inventory(made)


@pytest.mark.parametrize("spoil", ["gone", "torn", "other"])
def test_a_manifest_is_published_anew_as_it_was(made, spoil):
    stats = made.finish()
    whole = made.manifest.read_bytes()
    if spoil == "gone":
        made.manifest.unlink()
    elif spoil == "torn":
        made.manifest.write_bytes(whole[:-20])
    else:
        layout = read_layout(made.fields, HIDDEN)
        other = layout.manifest(
            made.world.rows, made.world.units[:-1], stats, fingerprint=made.record.fingerprint
        )
        manifests.publish(made.run_dir.features, other)
    _, found = inventory(made)
    assert (len(found.problems), found.is_whole) == (1, False)
    (line,) = mend(made)
    assert "published anew" in line
    assert made.manifest.read_bytes() == whole
    assert made.record.is_done()
    assert inventory(made)[1].is_whole


def test_a_manifest_that_was_never_published_is_no_problem(made):
    made.write([0, 1])
    assert inventory(made)[1].problems == ()
    made.write(range(2, len(made.world.units)))
    _, found = inventory(made)
    assert (found.problems, found.is_whole) == ((), True)
    assert (found.is_published, found.is_finished) == (False, False)
    (line,) = mend(made)
    assert "published anew" in line
    _, found = inventory(made)
    assert (found.is_published, found.is_finished) == (True, False)


def test_no_manifest_is_published_while_a_unit_is_missing(made):
    made.finish()
    made.manifest.unlink()
    made.world.path(0).unlink()
    assert mend(made) == ()
    assert not made.manifest.exists()


def test_a_whole_manifest_says_what_was_verified_where_the_journal_is_lost(made):
    made.finish()
    made.journal.unlink()
    made.world.write(1, seed=5)
    _, found = inventory(made)
    assert found.bad == 1, "another shard of the same tokens is not the one that was published"


def test_a_layout_without_its_fields_is_refused(made):
    for key in ("extract.layer_ids.0", "target.identity", "extract.shard_bytes"):
        fields = {k: v for k, v in made.fields.items() if k != key}
        with pytest.raises(IntegrityError, match="another version"):
            read_layout(fields, HIDDEN)


@given(st.sets(st.integers(0, 40)))
def test_a_manifest_names_every_unit_once(made_once, aside):
    made, stats, layout = made_once
    keys = {made.world.units[i].key: "r" for i in aside if i in stats}
    kept = {i: s for i, s in stats.items() if made.world.units[i].key not in keys}
    manifest = layout.manifest(
        made.world.rows, made.world.units, kept, fingerprint="f", quarantined=keys
    )
    named = [u.key for u in manifest.units] + [q.key for q in manifest.quarantined]
    assert sorted(named) == [u.key for u in made.world.units]
    if keys:
        with pytest.raises(ValueError, match="neither verified nor quarantined"):
            layout.manifest(made.world.rows, made.world.units, kept, fingerprint="f")


@pytest.fixture(scope="module")
def made_once(tmp_path_factory):
    made = make_feature_run(tmp_path_factory.mktemp("once") / "run", make_samples(60))
    return made, made.write(), read_layout(made.fields, HIDDEN)


@pytest.mark.parametrize("keep", ["none", "all"])
def test_a_crash_while_it_is_mended_leaves_the_old_journal_or_the_new_one(made, tmp_path, keep):
    made.write([0, 1, 2, 3])
    damaged = spoil_journal(made)
    subject = open_subject(made.run_dir)
    papers = read_papers(subject)
    found = look(subject, papers, deep=False)
    states = set()
    for step in range(1, 99):
        made.journal.write_bytes(damaged)
        for kept in made.run_dir.features.glob("journal.damaged-*"):
            kept.unlink()
        fs = CrashFs(made.run_dir.features, crash_after=step)
        with suppress(Crashed):
            repair(subject, papers, found, publish=False, fs=fs)
        after = fs.disk(keep)
        journal = after[JOURNAL]
        others = [data for name, data in after.items() if name.startswith("journal.damaged-")]
        if journal != damaged:
            assert journal is not None
            assert len(fold(journal, made.journal).records) == 4
            assert damaged in others
        states.add(journal == damaged)
        if not fs.has_crashed:
            break
    assert states == {True, False}


@pytest.mark.parametrize("forever", [False, True])
def test_a_disk_that_refuses_while_it_is_mended_leaves_one_of_the_two(made, forever):
    made.write([0, 1, 2, 3])
    damaged = spoil_journal(made)
    subject = open_subject(made.run_dir)
    papers = read_papers(subject)
    found = look(subject, papers, deep=False)
    step = 0
    for step in range(1, 99):
        made.journal.write_bytes(damaged)
        fs = FaultyFs(REAL_FS, fail_at=step, error=ENOSPC, forever=forever)
        try:
            repair(subject, papers, found, publish=False, fs=fs)
        except OSError:
            if made.journal.read_bytes() != damaged:
                assert len(fold(made.journal.read_bytes(), made.journal).records) == 4
        else:
            break
    assert step > 5
    assert made.journal.read_bytes() != damaged
