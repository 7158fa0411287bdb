"""How an extraction ends that could not do everything, and what is said of it afterwards."""

import errno
import os
from pathlib import Path

import pytest

from extract_runs import make_run, make_sample, make_samples
from extract_trials import events_of, journal_of, with_extract
from paceline.durable.errors import RecipeError, WorkerFailed
from paceline.durable.owner import owned
from paceline.durable.space import Space
from paceline.durable.store import LocalStore
from paceline.extract import making, stage
from paceline.recipe.run_dir import RunDir
from paceline.status import run_status
from paceline.watch.events import EventWriter
from paceline.watch.tail import last_events


def extract_status(root):
    return next(stage for stage in run_status(root).stages if stage.name == "extract")


@pytest.fixture
def broken_disk(monkeypatch):
    """Writing these shards fails as a disk does that has become read-only."""
    broken: set[str] = set()
    write = making.write_shard

    def failing(path, *args, **options):
        if path.name in broken:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return write(path, *args, **options)

    monkeypatch.setattr(making, "write_shard", failing)
    return broken


def test_a_run_that_set_shards_aside_has_failed_and_not_died(tmp_path, target, broken_disk):
    samples = [make_sample(n, 8) for n in range(40)]
    recipe, run_dir = make_run(tmp_path / "run", target, samples)
    broken_disk.add("unit-000001.safetensors")
    report = stage.run(recipe, run_dir)
    (undone,) = report.undone
    assert undone.endswith("`paceline extract` tries it again.")
    assert ".." not in undone.replace("...", "")
    assert run_status(run_dir.root).state == "failed"
    status = extract_status(run_dir.root)
    assert status.state == "failed"
    assert status.detail == undone
    assert status.counts.done == status.counts.total == 40
    (kept, left_out) = report.lines[1:3]
    there = report.numbers["units"] - 1
    assert f"in {there} shards," in kept
    aside = report.numbers["quarantined_samples"]
    assert report.numbers["samples"] + aside == 40
    assert left_out.startswith("of 40 samples read, ")
    assert f"{aside} are in shards set aside, 0 in shards that are not there yet" in left_out
    # Allowed, it counts as whole; and then nothing tries it again.
    allowing = with_extract(recipe, allow_quarantined=1)
    (undone,) = stage.run(allowing, run_dir).undone
    assert "with 0 there, `paceline extract` tries it again" in undone
    assert extract_status(run_dir.root).state == "finished"
    assert stage.run(allowing, run_dir).skipped
    # What was in the way is mended: with 0 it is made, and the manifest is another one.
    broken_disk.clear()
    report = stage.run(recipe, run_dir)
    assert not report.undone
    assert report.numbers["samples"] == 40


def test_a_disk_that_refuses_every_shard_ends_the_run_long_before_its_end(
    tmp_path, target, broken_disk
):
    samples = [make_sample(n, 8) for n in range(120)]
    recipe, run_dir = make_run(tmp_path / "run", target, samples, shard_bytes=3072)
    broken_disk.update(f"unit-{n:06d}.safetensors" for n in range(2, 100))
    with pytest.raises(WorkerFailed, match=r"the last 12 shards all failed.*Read-only file system"):
        stage.run(recipe, run_dir)
    assert len(events_of(run_dir, "quarantined")) == 12
    # Where as many may be missing, the run goes on to its end.
    allowing = with_extract(recipe, allow_quarantined=100)
    assert "manifest" in stage.run(allowing, run_dir).numbers


def test_a_bad_block_in_a_shard_that_is_looked_at_again_has_it_made_anew(
    tmp_path, target, monkeypatch
):
    recipe, run_dir = make_run(tmp_path / "run", target, make_samples(20))
    asked = with_extract(recipe, recheck_samples=100)
    stage.run(asked, run_dir)
    (run_dir.features / "manifest.json").unlink()
    # Beyond what every start reads in full.
    monkeypatch.setattr("paceline.extract.destination.DEEP_BYTES", 0)
    monkeypatch.setattr(LocalStore, "get_range", _with_bad_block("unit-000002.safetensors"))
    with pytest.MonkeyPatch.context() as patch:
        remade: list[str] = []
        write = making.write_shard

        def noting(path, *args, **options):
            remade.append(path.name)
            return write(path, *args, **options)

        patch.setattr(making, "write_shard", noting)
        report = stage.run(asked, run_dir)
    assert remade == ["unit-000002.safetensors"]
    assert "manifest" in report.numbers


def _with_bad_block(name):
    """Whole reads of this file fail; its header can be read."""
    read = LocalStore.get_range

    def get_range(self, key, start, end):
        size = Path(self.path(key)).stat().st_size
        if key == name and end == size:
            raise OSError(errno.EIO, os.strerror(errno.EIO), key)
        return read(self, key, start, end)

    return get_range


def test_a_torn_shard_that_no_record_knows_is_never_recorded_as_verified(
    tmp_path, target, monkeypatch
):
    recipe, run_dir = make_run(tmp_path / "run", target, make_samples(20))
    asked = with_extract(recipe, recheck_samples=100)
    stage.run(asked, run_dir)
    for name in ("manifest.json", "journal.jsonl"):
        (run_dir.features / name).unlink()
    torn = run_dir.features / "unit-000002.safetensors"
    data = bytearray(torn.read_bytes())
    data[-1] ^= 1
    torn.write_bytes(data)
    monkeypatch.setattr("paceline.extract.destination.DEEP_BYTES", 0)
    monkeypatch.setattr(making, "write_shard", _stopped)
    with pytest.raises(KeyboardInterrupt):
        stage.run(asked, run_dir)
    recorded = {r["key"] for r in journal_of(run_dir) if r["kind"] == "verified"}
    assert torn.name not in recorded
    assert recorded


def _stopped(*args, **options):
    raise KeyboardInterrupt


def test_workers_of_a_process_that_died_are_not_shown_while_the_next_one_looks(tmp_path, target):
    recipe, run_dir = make_run(tmp_path / "run", target, make_samples(8))
    stage.run(recipe, run_dir)
    path = run_dir.events / "extract.jsonl"
    told = next(e for e in last_events(path) if e["kind"] == "progress" and e.get("workers"))
    text = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(line for line in text if b'"kind":"finished"' not in line))
    (run_dir.features / "manifest.json").unlink()
    (run_dir.features / "extract.stage.json").unlink()
    data = path.read_bytes().replace(f'"pid":{told["pid"]},'.encode(), b'"pid":1,')
    path.write_bytes(data)
    with owned(run_dir.root, "paceline extract"), EventWriter(run_dir.events, "extract") as events:
        events.emit("checking")
        status = extract_status(run_dir.root)
        assert status.state == "running"
        assert status.extraction.workers == ()
        assert status.extraction.units > 0


def test_next_names_the_part_of_a_machine_that_shares_the_work(tmp_path, target):
    recipe, run_dir = make_run(
        tmp_path / "one", target, make_samples(12), store=str(tmp_path / "shared")
    )
    report = stage.run(recipe, run_dir, shard="1/2")
    assert any(f"not in {(tmp_path / 'shared').as_uri()}/" in line for line in report.lines)
    told = run_status(run_dir.root)
    assert told.next.startswith("`paceline extract ")
    assert "--shard 1/2" in told.next
    assert told.stages[2].extraction.part == "1/2"


def test_staging_without_room_at_the_start_is_waited_for_and_not_refused(
    tmp_path, target, monkeypatch, caplog
):
    """Exit code 2 would tell whoever restarts the service not to try again."""
    monkeypatch.setattr("paceline.durable.staging.read_space", lambda _: Space(100, 99, 1))
    recipe, run_dir = make_run(tmp_path / "run", target, make_samples(8), store="memory:")
    assert "manifest" in stage.run(recipe, run_dir).numbers
    with pytest.raises(RecipeError, match=r"staging_bytes is 1,000 .* Give .* at least"):
        stage.run(with_extract(recipe, staging_bytes=1000), RunDir(_copied(run_dir, tmp_path)))


def _copied(run_dir, folder):
    other = RunDir(folder / "other")
    other.corpus.mkdir(parents=True)
    other.prepared.write_bytes(run_dir.prepared.read_bytes())
    return other.root
