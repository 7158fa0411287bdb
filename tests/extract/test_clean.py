import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from extract_runs import make_samples
from feature_runs import make_feature_run
from paceline.cli.main import main
from paceline.durable.errors import UserError
from paceline.durable.journal import Journal
from paceline.durable.owner import LOCK, owned
from paceline.durable.staging import Staging, staging_root
from paceline.durable.store import LocalStore
from paceline.extract.clean import Wanted, carry_out, plan_clean
from paceline.recipe.fingerprint import digest_file
from paceline.recipe.stage import StageRecord, changed_outputs, read_record
from paceline.types.row_index import FILE_NAME as INDEX

FEATURES = Wanted(features=True)


@pytest.fixture
def made(tmp_path):
    made = make_feature_run(tmp_path / "run", make_samples(60))
    (made.run_dir.features / INDEX).write_bytes(b"index")
    return made


@pytest.fixture
def shared(tmp_path):
    """Stands for shared memory."""
    folder = tmp_path / "shm"
    folder.mkdir()
    return folder


def train(run_dir, steps=(100, 200, 300, 400), *, best=100, finished=True):
    """A training with real papers: checkpoints that list their files, and a record."""
    folder = run_dir.checkpoints
    record = StageRecord(folder, "train", {"x": 1})
    record.begin()
    for step in steps:
        write_checkpoint(folder / f"step_{step:06d}", step, 9.0 if step == best else 1.0)
    if finished:
        name = f"step_{best:06d}"
        record.finish([folder / name / "state.json"], {"best": name})


def write_checkpoint(folder, step, tau):
    folder.mkdir()
    state = {"step": step, "fingerprint": "f", "tau": {"ddtree-64": tau}}
    (folder / "state.json").write_text(json.dumps({"state": state}))
    (folder / "model.safetensors").write_bytes(bytes(1000))
    sums = {p.name: digest_file(p) for p in folder.iterdir()}
    (folder / "checksums.json").write_text(json.dumps(sums))


def extraction(made):
    record = read_record(made.run_dir.features, "extract")
    assert record is not None
    return record


def names(plan, kind):
    return [item.name for item in plan.items if item.kind == kind]


def tree(root):
    return {p.relative_to(root).as_posix() for p in root.rglob("*") if not p.is_dir()}


def clean(made, wanted, shared):
    plan = plan_clean(made.run_dir, wanted, shared_memory=shared)
    return plan, carry_out(plan, made.run_dir)


def test_without_flags_shards_and_checkpoints_stay(made, shared):
    made.finish()
    train(made.run_dir)
    before = tree(made.run_dir.root)
    plan, done = clean(made, Wanted(), shared)
    assert plan.items == ()
    assert (done.removed, done.failed) == (0, ())
    assert tree(made.run_dir.root) == before


def test_features_go_once_they_are_trained_on_and_the_record_says_so(made, shared):
    stats = made.finish()
    with pytest.raises(UserError, match="training has not come to its end"):
        plan_clean(made.run_dir, FEATURES, shared_memory=shared)
    train(made.run_dir, finished=False)
    with pytest.raises(UserError, match="--force"):
        plan_clean(made.run_dir, FEATURES, shared_memory=shared)
    train(made.run_dir, ())
    numbers = extraction(made).report
    plan, done = clean(made, FEATURES, shared)
    assert len(names(plan, "shard")) == len(stats)
    assert done.bytes == plan.bytes > sum(stat.size for stat in stats.values())
    assert tree(made.run_dir.features) == {"extract.stage.json"}
    record = extraction(made)
    assert record.outputs == {}
    assert record.report["samples"] == numbers["samples"]
    assert record.report["cleaned"] > 0
    again, done = clean(made, FEATURES, shared)
    assert (again.items, done.removed, done.failed) == ((), 0, ())


def test_what_an_online_training_has_kept_goes_with_the_features(made, shared):
    """Its journal lists the shards; what it does not list stays, and is named."""
    made.finish()
    run_dir = made.run_dir
    train(run_dir)
    run_dir.tee.mkdir()
    (run_dir.tee / "tee-000000.safetensors").write_bytes(b"kept")
    (run_dir.tee / "tee-000007.safetensors").write_bytes(b"not listed")
    with Journal(run_dir.tee / "journal.jsonl") as journal:
        journal.append({"kind": "kept", "index": 0})
    assert not names(plan_clean(run_dir, Wanted(), shared_memory=shared), "kept")
    plan, _ = clean(made, FEATURES, shared)
    assert names(plan, "kept") == ["tee"]
    assert any("tee-000007" in line for line in plan.left)
    assert [p.name for p in run_dir.tee.iterdir()] == ["tee-000007.safetensors"]


def test_cleaned_features_are_made_again_when_asked_for(made, shared):
    made.finish()
    train(made.run_dir)
    clean(made, FEATURES, shared)
    record = StageRecord(made.run_dir.features, "extract", made.fields)
    assert not record.is_done()
    record.begin()
    assert extraction(made).outputs is None


def test_unfinished_features_go_by_force(made, shared):
    made.write([0, 1])
    clean(made, Wanted(features=True, force=True), shared)
    assert tree(made.run_dir.features) == {"extract.stage.json"}


def test_nothing_goes_that_is_not_listed_as_it_is(made, shared):
    made.finish()
    train(made.run_dir)
    folder = made.run_dir.features
    (folder / "unit-999999.safetensors").write_bytes(b"mine")
    (folder / "notes.txt").write_bytes(b"mine")
    (folder / "journal.damaged-20260101-000000.jsonl").write_bytes(b"kept")
    made.world.path(3).write_bytes(b"mine, under a listed name")
    foreign = {
        "unit-999999.safetensors",
        "notes.txt",
        "journal.damaged-20260101-000000.jsonl",
        made.world.units[3].key,
    }
    plan, done = clean(made, FEATURES, shared)
    assert tree(folder) == {*foreign, "extract.stage.json"}
    assert not done.failed
    for name in foreign:
        assert any(line.startswith((f"{name}:", f"features/{name}:")) for line in plan.left), name


@pytest.mark.parametrize("lost", ["journal", "manifest"])
def test_either_paper_is_enough_to_know_the_shards(made, shared, lost):
    made.finish()
    train(made.run_dir)
    getattr(made, lost).unlink()
    clean(made, FEATURES, shared)
    assert tree(made.run_dir.features) == {"extract.stage.json"}


def test_without_papers_no_shard_goes(made, shared):
    stats = made.finish()
    train(made.run_dir)
    made.journal.unlink()
    made.manifest.write_bytes(b"{}")
    plan, _ = clean(made, FEATURES, shared)
    assert names(plan, "shard") == []
    assert len(list(made.run_dir.features.glob("unit-*"))) == len(stats) == len(plan.left)


class Killed(BaseException):
    pass


def test_killed_at_any_point_it_can_be_run_again(made, shared, monkeypatch):
    made.finish()
    train(made.run_dir)
    monkeypatch.setattr("paceline.extract.clean._BATCH", 2)
    delete, kills = LocalStore.delete, 0

    def die(store, keys):
        delete(store, list(keys)[:1])
        raise Killed

    while len(list(made.run_dir.features.glob("unit-*"))) > 2:
        monkeypatch.setattr(LocalStore, "delete", die)
        with pytest.raises(Killed):
            clean(made, FEATURES, shared)
        kills += 1
        assert made.journal.exists()
        assert made.manifest.exists()
    monkeypatch.setattr(LocalStore, "delete", delete)
    _, done = clean(made, FEATURES, shared)
    assert done.failed == ()
    assert kills > 3
    assert tree(made.run_dir.features) == {"extract.stage.json"}


def test_the_papers_go_last_the_journal_behind_all_others(made, shared):
    made.finish()
    train(made.run_dir)
    plan = plan_clean(made.run_dir, FEATURES, shared_memory=shared)
    assert [item.kind for item in plan.items][-3:] == ["paper"] * 3
    assert names(plan, "paper") == [
        f"features/{n}" for n in (INDEX, "manifest.json", "journal.jsonl")
    ]


def test_a_store_that_refuses_keeps_the_papers(made, shared, monkeypatch):
    made.finish()
    train(made.run_dir)
    plan = plan_clean(made.run_dir, FEATURES, shared_memory=shared)

    def refuse(store, keys):
        raise OSError(13, "Permission denied")

    monkeypatch.setattr(LocalStore, "delete", refuse)
    done = carry_out(plan, made.run_dir)
    assert len(done.failed) == 2
    assert "manifest and journal stay" in done.failed[1]
    assert made.journal.exists()
    assert made.manifest.exists()


def test_a_store_elsewhere_is_cleaned_below_the_fingerprint(tmp_path, shared):
    far = tmp_path / "far"
    made = make_feature_run(tmp_path / "run", make_samples(60), store=str(far))
    made.finish()
    train(made.run_dir)
    (far / "mine.txt").write_text("mine")
    below = far / made.record.fingerprint
    (below / "run.json").write_text("{}")
    (below / "manifest.json").write_bytes(b"of another run")
    plan, done = clean(made, FEATURES, shared)
    assert tree(far) == {"mine.txt", f"{below.name}/manifest.json"}
    assert any("not the manifest of this run" in line for line in plan.left)
    assert not done.failed
    assert tree(made.run_dir.features) == {"extract.stage.json"}


def test_a_manifest_beside_the_shards_goes_with_them(tmp_path, shared):
    made = make_feature_run(tmp_path / "run", make_samples(60), store=str(tmp_path / "far"))
    made.finish()
    train(made.run_dir)
    below = tmp_path / "far" / made.record.fingerprint
    (below / "manifest.json").write_bytes(made.manifest.read_bytes())
    clean(made, FEATURES, shared)
    assert tree(tmp_path / "far") == set()


def test_the_newest_the_best_and_the_chosen_checkpoints_stay(made, shared):
    train(made.run_dir, (100, 200, 300, 400, 500), best=200)
    folder = made.run_dir.checkpoints
    write_checkpoint(folder / "step_000350.aside", 350, 5.0)
    (folder / "step_000100" / "notes.txt").write_text("mine")
    (folder / "step_000050").mkdir()
    plan, done = clean(made, Wanted(checkpoints=True, keep=1), shared)
    assert sorted(names(plan, "checkpoint")) == [
        "checkpoints/step_000300",
        "checkpoints/step_000350.aside",
        "checkpoints/step_000400",
    ]
    assert not done.failed
    stay = {p.name for p in folder.iterdir() if p.is_dir()}
    assert stay == {"step_000050", "step_000100", "step_000200", "step_000500"}
    assert any("step_000100: holds what is not of it: notes.txt" in line for line in plan.left)
    assert any("step_000050: its checksums.json cannot be read" in line for line in plan.left)
    assert done.bytes == plan.bytes > 3000


def test_an_unfinished_training_keeps_what_it_goes_on_from(made, shared):
    train(made.run_dir, (100, 200, 300), best=100, finished=False)
    clean(made, Wanted(checkpoints=True, keep=1), shared)
    stay = {p.name for p in made.run_dir.checkpoints.iterdir() if p.is_dir()}
    assert stay == {"step_000100", "step_000300"}
    with pytest.raises(UserError, match="--keep 0"):
        plan_clean(made.run_dir, Wanted(checkpoints=True, keep=0))


def test_a_checkpoint_that_was_half_removed_goes_with_the_next_call(made, shared):
    train(made.run_dir, (100, 200, 300), best=300)
    (made.run_dir.checkpoints / "step_000100" / "state.json").unlink()
    plan, _ = clean(made, Wanted(checkpoints=True, keep=1), shared)
    assert sorted(names(plan, "checkpoint")) == [
        "checkpoints/step_000100",
        "checkpoints/step_000200",
    ]


def test_half_written_files_of_the_dead_go_and_of_the_living_stay(made, shared):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    features, checkpoints = made.run_dir.features, made.run_dir.checkpoints
    ours = features / f"unit-000001.safetensors.{dead.pid}.partial"
    ours.write_bytes(b"12345")
    living = features / f"unit-000002.safetensors.{os.getpid()}.partial"
    living.write_bytes(b"1")
    foreign = features / "download.partial"
    foreign.write_bytes(b"mine")
    half = checkpoints / "step_000100.partial"
    half.mkdir(parents=True)
    (half / "model.safetensors").write_bytes(b"1")
    outside = made.run_dir.root.with_name("outside")
    outside.mkdir()
    (outside / "mine").write_text("mine")
    (checkpoints / "step_000200.partial").symlink_to(outside)
    plan, done = clean(made, Wanted(), shared)
    assert sorted(names(plan, "partial")) == [
        "checkpoints/step_000100.partial",
        "checkpoints/step_000200.partial",
        f"features/{ours.name}",
    ]
    assert not done.failed
    assert living.exists()
    assert foreign.exists()
    assert (outside / "mine").exists()
    assert list(checkpoints.iterdir()) == []
    assert any("is writing it" in line for line in plan.left)


def test_copies_of_listed_shards_go_and_strangers_stay(made, shared):
    made.write([0, 1])
    cache = made.run_dir.shard_cache / made.record.fingerprint
    cache.mkdir(parents=True)
    (cache / made.world.units[0].key).write_bytes(b"copy")
    (cache / f"{made.world.units[1].key}.4096.fetch").write_bytes(b"half a copy")
    (cache.parent / "cache.lock").touch()
    (cache / "mine.txt").write_text("mine")
    plan, _ = clean(made, Wanted(), shared)
    assert len(names(plan, "copy")) == 3
    assert tree(made.run_dir.shard_cache) == {f"{made.record.fingerprint}/mine.txt"}
    (cache / "mine.txt").unlink()
    clean(made, Wanted(), shared)
    assert not made.run_dir.shard_cache.exists()
    assert made.world.path(0).exists()


def stage_units(made, folder, indices):
    with Journal(made.journal) as journal:
        staging = Staging(folder, made.run_dir.root)
        for index in indices:
            stat = made.world.write(index)
            made.world.path(index).rename(staging.path(made.world.units[index].key))
            journal.append({**made.world.verified({index: stat})[0], "kind": "staged"})
    return staging


@pytest.mark.parametrize("where", ["run", "shared"])
def test_what_waits_for_its_upload_stays_until_the_extraction_is_over(made, shared, where):
    folder = shared if where == "shared" else made.run_dir.staging
    stage_units(made, folder, [0, 1]).close()
    root = staging_root(folder, made.run_dir.root)
    (root / "units" / "mine.txt").write_text("mine")
    plan, _ = clean(made, Wanted(), shared)
    assert names(plan, "staged") == []
    assert sum("waits for its upload" in line for line in plan.left) == 2
    (root / "units" / "mine.txt").unlink()
    with Journal(made.journal) as journal:
        journal.append(made.world.verified({0: made.world.write(0)})[0])
    plan, _ = clean(made, Wanted(), shared)
    assert [Path(n).name for n in names(plan, "staged")] == [made.world.units[0].key]
    made.finish()
    clean(made, Wanted(), shared)
    assert not root.exists()


def test_staging_of_other_runs_and_of_the_living_is_left(made, shared, tmp_path):
    other = Staging(shared, tmp_path / "other")
    other.path("unit-000000.safetensors").write_bytes(b"theirs")
    own = stage_units(made, shared, [0])
    made.finish()
    plan, _ = clean(made, Wanted(), shared)
    assert names(plan, "staged") == []
    assert any("a process holds it" in line for line in plan.left)
    own.close()
    clean(made, Wanted(), shared)
    assert not own.root.exists()
    assert other.path("unit-000000.safetensors").exists()
    other.close()


def test_the_score_goes_on_without_the_features(made, shared):
    """Its inputs are judged by the records, and the extraction's says that it was finished."""
    made.finish()
    train(made.run_dir)
    clean(made, FEATURES, shared)
    record = extraction(made)
    assert record.outputs is not None
    assert changed_outputs(made.run_dir.features, record) == []


def command(made, *flags):
    return main(["clean", str(made.run_dir.root), *flags])


def test_the_command_says_what_would_go_and_does_it_when_told(made, capsys):
    made.finish()
    train(made.run_dir)
    (made.run_dir.features / "mine.txt").write_text("mine")
    before = tree(made.run_dir.root)
    assert command(made, "--features", "--checkpoints", "--keep", "1") == 0
    out = capsys.readouterr().out
    assert tree(made.run_dir.root) == before
    assert f"{len(made.world.units)} shards, " in out
    assert "2 checkpoints, " in out
    assert "left: features/mine.txt: not listed" in out
    assert f"`paceline clean {made.run_dir.root} --features --checkpoints --keep 1 --yes`" in out
    assert command(made, "--features", "--checkpoints", "--keep", "1", "--yes") == 0
    assert "freed." in capsys.readouterr().out
    assert tree(made.run_dir.features) == {"extract.stage.json", "mine.txt"}
    assert command(made, "--features") == 0
    assert "nothing to remove." in capsys.readouterr().out


def test_the_command_refuses_under_a_command_at_work(made, capsys):
    made.finish()
    for flags in ((), ("--yes",)):
        with owned(made.run_dir.root, "paceline train"):
            assert command(made, *flags) == 2
        assert "`paceline train` is at work" in capsys.readouterr().err
    assert main(["clean", str(made.run_dir.corpus)]) == 2


def test_a_dry_run_leaves_no_trace(made):
    made.finish()
    assert command(made) == 0
    assert not (made.run_dir.root / LOCK).exists()


def test_verify_says_that_the_features_were_cleaned_away(made, shared, capsys):
    made.finish()
    train(made.run_dir)
    clean(made, FEATURES, shared)
    assert main(["verify", str(made.run_dir.root)]) == 2
    assert "were removed by `paceline clean`" in capsys.readouterr().err


def test_cleaning_knows_no_torch():
    program = "import sys, paceline.extract.clean; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
