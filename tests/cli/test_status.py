"""`paceline status`: every state of a run, made for real, and nothing changed by looking."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import paceline
from frozen_mounts import frozen
from paceline.cli.main import main
from paceline.durable.errors import UserError
from paceline.durable.owner import LOCK, owned
from paceline.recipe.run_dir import RunDir
from paceline.recipe.stage import StageRecord, read_record
from paceline.stage_folders import folder_of
from paceline.stage_status import STAGES
from paceline.status import RunStatus, run_status
from paceline.watch.events import COUNTED, Counts, Kind
from paceline.watch.words import number, span
from tiny_run import tiny_project
from training_runs import stop_after

LONG = ("--set", "train.epochs=4000", "--set", "train.evaluations=1")


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> tuple[Path, Path]:
    """A recipe, and its run from the beginning to the end."""
    root = tmp_path_factory.mktemp("straight")
    recipe = tiny_project(root)
    assert main(["run", str(recipe), "--run", str(root / "run")]) == 0
    return recipe, root / "run"


@pytest.fixture
def run(straight, tmp_path) -> RunDir:
    """A copy of that run."""
    shutil.copytree(straight[1], tmp_path / "run")
    return RunDir(tmp_path / "run")


@pytest.fixture
def untrained(run) -> RunDir:
    """A run whose training has not begun."""
    for folder in (run.checkpoints, run.score):
        shutil.rmtree(folder)
    for stage in ("train", "score"):
        (run.events / f"{stage}.jsonl").unlink()
    return run


@pytest.fixture(scope="module")
def killed(straight, tmp_path_factory) -> tuple[RunDir, RunStatus, int]:
    """A run killed in the training; how it stood right before; the pid of its process."""
    run = RunDir(tmp_path_factory.mktemp("killed") / "run")
    shutil.copytree(straight[1], run.root, ignore=shutil.ignore_patterns("checkpoints", "score*"))
    (run.events / "train.jsonl").unlink()
    command = [sys.executable, "-m", "paceline", "run", str(straight[0]), "--run", str(run.root)]
    with subprocess.Popen(
        [*command, *LONG],
        env={**os.environ, "PYTHONPATH": str(Path(paceline.__file__).parents[1])},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        told = run.events / "train.jsonl"
        end = time.monotonic() + 60
        while not (told.is_file() and told.read_bytes().count(b'"kind":"step"') > 5):
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.02)
        process.send_signal(signal.SIGSTOP)
        status = look(run)
        process.kill()
    return run, status, process.pid


def snapshot(root: Path) -> dict[str, Any]:
    return {
        str(p.relative_to(root)): (p.lstat().st_mtime_ns, p.read_bytes() if p.is_file() else None)
        for p in sorted(root.rglob("*"))
    }


def look(run: RunDir) -> RunStatus:
    """The status; the run directory is byte for byte as before."""
    before = snapshot(run.root)
    status = run_status(run.root)
    assert snapshot(run.root) == before
    return status


def shown(run: RunDir, capsys: pytest.CaptureFixture[str], code: int) -> str:
    capsys.readouterr()
    assert main(["status", str(run.root)]) == code
    text = capsys.readouterr().out
    long = [line for line in text.splitlines() if len(line) > 100 and str(run.root) not in line]
    assert long == [], "readable at 100 columns"
    return text


def states(status: RunStatus) -> dict[str, str]:
    return {stage.name: stage.state for stage in status.stages}


def events(run: RunDir, stage: str) -> list[dict]:
    return [json.loads(line) for line in (run.events / f"{stage}.jsonl").read_bytes().splitlines()]


def rewrite(path: Path, **fields: Any) -> None:
    """Change fields of every event in a file."""
    lines = [json.loads(line) | fields for line in path.read_bytes().splitlines()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_finished_run(run, capsys):
    status = look(run)
    assert status.state == "finished"
    assert set(states(status).values()) == {"finished"}
    done = {s.name: (s.counts.done, s.counts.total, s.counts.unit) for s in status.stages}
    assert done == {
        "prepare": (19, 19, "rows"),
        "regenerate": (16, 16, "prompts"),
        "extract": (16, 16, "samples"),
        "train": (26, 26, "samples"),
        "score": (3, 3, "prompts"),
    }
    assert all(s.counts.rate > 0 and s.counts.eta is None and s.seconds > 0 for s in status.stages)
    train, score = status.stages[-2:]
    result = json.loads((run.score / "result.json").read_bytes())
    assert score.tau == {name: pooled["tau"] for name, pooled in result["pooled"].items()}
    assert train.training.checkpoints == ("step_000004", "step_000007")
    assert train.training.newest == "step_000007"
    assert train.training.best == read_record(run.checkpoints, "train").report["best"]
    last = [e for e in events(run, "train") if e["kind"] == "step"][-1]
    assert (train.training.step, train.training.loss) == (last["step"], last["loss"])
    measured = [e for e in events(run, "train") if e["kind"] == "evaluation"][-1]
    assert train.training.tau == measured["simulated_tau"]
    text = shown(run, capsys, 0)
    assert "prepare     finished     19 of 19 rows" in text
    assert "next: Nothing is left to do." in text


def test_a_run_at_work(killed):
    _, status, pid = killed
    assert status.state == "running"
    assert (status.owner.pid, status.owner.doing) == (pid, "paceline run")
    assert states(status) == dict.fromkeys(STAGES, "finished") | {
        "train": "running",
        "score": "pending",
    }
    train = status.stages[3]
    assert (train.pid, train.host) == (pid, status.owner.host)
    assert train.counts.total == 4000 * 13
    assert 20 <= train.counts.done < train.counts.total
    assert train.counts.eta > 0
    assert train.training.loss > 0
    assert "again shows how it goes on" in status.next


def test_a_killed_run_has_died_with_pid_host_and_last_word(killed, capsys):
    run, before, pid = killed
    status = look(run)
    assert status.state == "died"
    assert (status.owner, status.died.pid) == (None, pid)
    train = status.stages[3]
    assert train.state == "died"
    assert (
        f"Process {pid} on {os.uname().nodename} ended without a word; last heard" in train.detail
    )
    assert (train.counts.rate, train.counts.eta) == (None, None)
    assert train.counts.done >= before.stages[3].counts.done
    assert train.training.resumes_from is None
    text = shown(run, capsys, 1)
    assert "goes on from the beginning: no checkpoint yet." in text
    assert f"paceline run --run {run.root}" in text
    # Where the lock's words are gone as well, as after a power cut, the events say who it was.
    words = (run.root / LOCK).read_bytes()
    (run.root / LOCK).write_bytes(b"")
    assert look(run).stages[3] == train
    (run.root / LOCK).write_bytes(words)


def test_a_power_cut_is_named(killed, tmp_path):
    run = RunDir(tmp_path / "run")
    shutil.copytree(killed[0].root, run.root)
    rewrite(run.events / "train.jsonl", t=1e9)
    assert "This machine was started anew since then." in look(run).stages[3].detail
    rewrite(run.events / "train.jsonl", t=1e9, host="elsewhere")
    assert "started anew" not in look(run).stages[3].detail


def test_killed_before_the_first_event(killed, tmp_path):
    run = RunDir(tmp_path / "run")
    shutil.copytree(killed[0].root, run.root)
    (run.events / "train.jsonl").unlink()
    status = look(run)
    assert (status.state, status.stages[3].state) == ("died", "died")
    assert "left no events" in status.stages[3].detail
    for path in run.checkpoints.iterdir():
        path.unlink()
    status = look(run)
    assert (status.state, status.stages[3].state) == ("died", "pending")
    assert "`paceline run`, process" in status.notes[0]


def test_an_interrupted_run(untrained, straight, monkeypatch, capsys):
    stop_after(monkeypatch, 2)
    assert main(["run", "--run", str(untrained.root)]) == 130
    status = look(untrained)
    assert (status.state, status.stages[3].state) == ("interrupted", "interrupted")
    assert status.stages[3].detail.startswith("SIGTERM: stopped after step 2")
    assert status.stages[3].counts.done == 8
    assert status.stages[3].training.newest == "step_000002"
    text = shown(untrained, capsys, 1)
    assert "It goes on from step_000002." in text
    assert "train: checkpoint step_000002;" in text
    assert "goes on from what is complete" in text
    monkeypatch.undo()
    assert main(["run", "--run", str(untrained.root)]) == 0
    train = look(untrained).stages[3]
    assert (train.state, train.counts.done, train.counts.skipped) == ("finished", 26, 8)


def test_a_failed_stage_says_its_error(untrained, capsys):
    shard = next(untrained.features.glob("unit-*"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert main(["train", "--run", str(untrained.root)]) == 1
    said = capsys.readouterr().err
    status = look(untrained)
    assert (status.state, status.stages[3].state) == ("failed", "failed")
    assert status.stages[3].detail.splitlines()[0] in said
    assert shard.name in shown(untrained, capsys, 1)
    assert "Mend what the error names" in status.next


def test_a_refused_stage_says_what_it_lacks(untrained, capsys):
    (untrained.features / "extract.stage.json").unlink()
    assert main(["train", "--run", str(untrained.root)]) == 2
    status = look(untrained)
    assert (status.state, states(status)["train"]) == ("refused", "refused")
    assert "`paceline extract` has not come to its end" in status.stages[3].detail
    assert "Do what the refusal says" in shown(untrained, capsys, 1)


def test_what_was_refused_before_an_earlier_stage_was_finished_is_past(untrained, capsys):
    (untrained.features / "extract.stage.json").unlink()
    assert main(["train", "--run", str(untrained.root)]) == 2
    assert look(untrained).state == "refused"
    assert main(["extract", "--run", str(untrained.root)]) == 0
    status = look(untrained)
    assert (status.state, states(status)["train"]) == ("partial", "pending")
    assert status.stages[2].ended == events(untrained, "extract")[-1]["t"]
    text = shown(untrained, capsys, 0)
    assert "Do what the refusal says" not in text
    assert "The last attempt at it was refused, before extract was finished" in text
    # An extraction that was found complete has changed nothing: what came after it stands.
    assert main(["train", "--run", str(untrained.root), "--set", "target.layers=9"]) == 2
    untold = look(untrained).state
    assert main(["extract", "--run", str(untrained.root)]) == 0
    assert events(untrained, "extract")[-1]["kind"] == "skipped"
    assert look(untrained).state == untold


def test_what_failed_over_a_damaged_shard_is_past_once_that_is_mended(untrained):
    shard = next(untrained.features.glob("unit-*"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert main(["train", "--run", str(untrained.root)]) == 1
    assert main(["extract", "--run", str(untrained.root)]) == 0
    status = look(untrained)
    assert (status.state, states(status)["train"]) == ("interrupted", "interrupted")
    assert "before extract was finished" in status.stages[3].notes[-1]
    assert main(["train", "--run", str(untrained.root)]) == 0
    assert look(untrained).stages[3].notes == ()


def test_an_attempt_that_is_refused_leaves_a_finished_stage_finished(run):
    arguments = ["train", "--run", str(run.root), "--set", "train.seed=9"]
    assert main(arguments) == 2
    status = look(run)
    assert status.state == "finished"
    assert "The last attempt at it ended early" in status.stages[3].notes[0]
    assert status.stages[3].counts.done == 26


def test_stages_that_wait(straight, tmp_path, capsys):
    run = RunDir(tmp_path / "run")
    assert main(["prepare", str(straight[0]), "--run", str(run.root)]) == 0
    status = look(run)
    assert (status.state, states(status)["regenerate"]) == ("partial", "pending")
    assert "goes on from what is complete" in shown(run, capsys, 0)
    shutil.rmtree(run.corpus)
    shutil.rmtree(run.events)
    assert look(run).state == "empty"
    assert f"next: `paceline run --run {run.root}` begins." in shown(run, capsys, 0)


def test_regenerate_is_off_where_the_recipe_says_so(straight, tmp_path):
    run = RunDir(tmp_path / "run")
    data = tmp_path / "answered.jsonl"
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "an answer"}]
    rows = [{"messages": [{**turns[0], "content": f"q{n}"}, turns[1]]} for n in range(16)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["prepare", str(straight[0]), "--run", str(run.root)]
    changes = ["regenerate.enabled=false", f"corpus.sources.0.path={data}"]
    assert main([*arguments, *(w for change in changes for w in ("--set", change))]) == 0
    assert states(look(run))["regenerate"] == "off"
    run.recipe.unlink()
    assert states(look(run))["regenerate"] == "off"


def test_what_was_redone_skipped_and_set_aside_is_told(untrained, straight, capsys):
    # One shard is torn, one group damaged; the records of the stages after them are gone.
    shards = sorted(untrained.features.glob("unit-*"))
    shards[0].write_bytes(shards[0].read_bytes()[:-9])
    (untrained.features / "extract.stage.json").unlink()
    (untrained.corpus / "answers" / "group-00001.jsonl").write_bytes(b"{}")
    (untrained.corpus / "regenerate.stage.json").unlink()
    for stage in ("regenerate", "extract"):
        assert main([stage, "--run", str(untrained.root)]) == 0
    _, regenerate, extract, *_ = look(untrained).stages
    assert regenerate.counts.redone == {"not as it was written": 1}
    assert regenerate.counts.skipped == 12
    assert extract.counts.redone == {"torn or damaged": 1}
    assert 0 < extract.counts.skipped < 16
    text = shown(untrained, capsys, 0)
    assert "extract: redone 1 shard: 1 torn or damaged" in text
    assert "regenerate: 12 prompts were done by earlier runs" in text


def test_rows_set_aside_are_told_with_reasons(straight, tmp_path, capsys):
    data = tmp_path / "rows.jsonl"
    data.write_bytes((straight[0].parent / "train.jsonl").read_bytes() + b"{\n{\n")
    run = RunDir(tmp_path / "run")
    arguments = ["prepare", str(straight[0]), "--run", str(run.root)]
    assert main([*arguments, "--set", f"corpus.sources.0.path={data}"]) == 0
    assert look(run).stages[0].counts.quarantined == {"bad_json": 2}
    assert "prepare: set aside 2 rows: 2 bad_json" in shown(run, capsys, 0)


def test_without_events_the_records_tell(run, capsys):
    with_events = look(run)
    shutil.rmtree(run.events)
    status = look(run)
    assert states(status) == states(with_events)
    for stage, before in zip(status.stages[:-1], with_events.stages[:-1], strict=True):
        assert (stage.counts.done, stage.counts.tokens) == (
            before.counts.done,
            before.counts.tokens,
        )
        assert stage.heard is None
    shown(run, capsys, 0)


def test_events_of_another_version_are_named_and_not_guessed_at(run, killed, tmp_path, capsys):
    rewrite(run.events / "extract.jsonl", v=3, done={"a": 1})
    rewrite(run.events / "score.jsonl", v=1)
    status = look(run)
    assert status.state == "finished"
    assert "a newer Paceline" in status.stages[2].notes[0]
    assert "an older Paceline" in status.stages[4].notes[0]
    assert status.stages[2].counts.done == 16, "as the record says"
    shown(run, capsys, 0)


@pytest.mark.parametrize("stage", STAGES)
def test_a_damaged_record_is_said(run, capsys, stage):
    path = folder_of(stage, run) / f"{stage}.stage.json"
    whole = path.read_bytes()
    for data in (whole.replace(b'"stage"', b'"stags"', 1), whole[: len(whole) // 2], b"", b"[]"):
        path.write_bytes(data)
        status = look(run)
        assert (status.state, states(status)[stage]) == ("damaged", "damaged")
        damaged = status.stages[STAGES.index(stage)]
        assert "not the stage record that was written" in damaged.detail
    assert str(path) in shown(run, capsys, 1)


def test_an_output_that_is_gone_or_cut_is_said(run):
    run.regenerated.write_bytes(run.regenerated.read_bytes()[:-1])
    (run.score / "result.json").unlink()
    status = look(run)
    assert status.state == "damaged"
    assert "not as many as were written" in status.stages[1].detail
    assert "result.json: No such file" in status.stages[4].detail


def test_a_damaged_recipe_and_unreadable_events_are_notes(run, capsys):
    run.recipe.write_text("a: [")
    (run.events / "train.jsonl").unlink()
    (run.events / "train.jsonl").mkdir()
    status = look(run)
    assert (status.state, status.name) == ("finished", None)
    assert str(run.recipe) in status.notes[0]
    assert "train.jsonl: cannot be read (Is a directory)" in status.stages[3].notes[0]
    assert "note: " in shown(run, capsys, 0)


@pytest.mark.parametrize("stage", ["extract", "train"])
def test_a_folder_on_a_frozen_mount_is_told_and_the_events_tell_the_rest(
    run, tmp_path, capsys, monkeypatch, stage
):
    before = {s.name: s for s in look(run).stages}
    folder, place = folder_of(stage, run), tmp_path / "elsewhere"
    folder.rename(place)
    folder.symlink_to(place)
    monkeypatch.setattr("paceline.status._FOLDER_SECONDS", 0.5)
    with frozen(place):
        started = time.monotonic()
        text = shown(run, capsys, 0)
        assert main(["status", str(run.root), "--json"]) == 0
        assert time.monotonic() - started < 5
        status = json.loads(capsys.readouterr().out)
    assert status["state"] == "finished"
    said = f"{stage}: {folder} does not answer: a read there has not come back for 0.5 s"
    assert said in re.sub(r"\s+", " ", text)
    for told in status["stages"]:
        known = before[told["name"]]
        assert (told["state"], told["counts"]["done"]) == (known.state, known.counts.done)
        assert bool(told["notes"]) == (told["name"] == stage)
        assert bool(told["report"]) == (told["name"] != stage)
    extraction = json.loads(msgspec.json.encode(before["extract"].extraction))
    assert status["stages"][2]["extraction"] == extraction
    assert (status["stages"][3]["training"] is None) == (stage == "train")
    assert look(run).stages == tuple(before.values())


def test_a_run_that_died_over_a_folder_that_does_not_answer(killed, tmp_path, monkeypatch):
    run = RunDir(tmp_path / "run")
    shutil.copytree(killed[0].root, run.root)
    place = tmp_path / "elsewhere"
    run.checkpoints.rename(place)
    run.checkpoints.symlink_to(place)
    monkeypatch.setattr("paceline.status._FOLDER_SECONDS", 0.5)
    with frozen(place):
        status = run_status(run.root)
        (run.events / "train.jsonl").unlink()
        silent = run_status(run.root)
    assert (status.state, status.stages[3].state) == ("died", "died")
    assert "ended without a word" in status.stages[3].detail
    assert "goes on from" not in status.stages[3].detail, "nobody knows by now"
    assert silent.stages[3].state == "pending"
    assert "does not answer" in silent.stages[3].notes[0]


def test_a_checkpoint_that_cannot_be_read_is_still_named(run):
    (run.checkpoints / "step_000007" / "state.json").write_bytes(b"{")
    (run.checkpoints / "train.stage.json").unlink()
    training = look(run).stages[3].training
    assert (training.newest, training.resumes_from) == ("step_000007", "step_000004")
    assert (training.best, training.tau_step) == ("step_000004", 4)


def choose_anew(run: RunDir) -> str:
    """Have the training's record name the checkpoint that it did not choose; return its name."""
    record = read_record(run.checkpoints, "train")
    (other,) = {"step_000004", "step_000007"} - {record.report["best"]}
    outputs = [run.checkpoints / other / name for name in ("model.safetensors", "config.json")]
    rewritten = StageRecord(run.checkpoints, "train", record.fields)
    rewritten.begin()
    rewritten.finish(outputs, record.report | {"best": other})
    return other


def test_the_best_of_a_finished_training_is_what_its_record_says(run):
    other = choose_anew(run)
    assert look(run).stages[3].training.best == other


def test_a_score_of_a_drafter_that_is_no_longer_chosen_is_outdated(run, capsys):
    before = look(run).stages[4].tau
    choose_anew(run)
    status = look(run)
    assert (status.state, states(status)["score"]) == ("partial", "outdated")
    assert status.stages[4].tau == before, "shown, with what it is of"
    text = shown(run, capsys, 0)
    assert "score: measured another drafter than the one chosen now" in text
    assert f"next: `paceline run --run {run.root}`" in text
    assert "Nothing is left to do" not in text
    assert main(["score", "--run", str(run.root)]) == 0
    assert look(run).state == "finished"


def test_methods_stand_by_their_budgets(run, capsys):
    record = read_record(run.score, "score")
    rewritten = StageRecord(run.score, "score", record.fields)
    rewritten.begin()
    numbers = {"ddtree-8": 1.2, "chain": 1.1, "ddtree-16": 1.3}
    rewritten.finish([run.score / "result.json"], numbers)
    assert "score: τ chain 1.100, ddtree-8 1.200, ddtree-16 1.300\n" in shown(run, capsys, 0)


def test_commands_to_copy_hold_for_paths_with_spaces(run, tmp_path, capsys):
    spaced = RunDir(tmp_path / "my runs" / "it's one")
    shutil.copytree(run.root, spaced.root)
    (spaced.score / "score.stage.json").unlink()
    told = look(spaced).next.split("`")[1]
    assert shlex.split(told) == ["paceline", "run", "--run", str(spaced.root)]


def test_a_single_one_is_counted_in_the_singular(straight, tmp_path, capsys):
    data = tmp_path / "rows.jsonl"
    data.write_bytes((straight[0].parent / "train.jsonl").read_bytes() + b"{\n")
    run = RunDir(tmp_path / "run")
    arguments = ["prepare", str(straight[0]), "--run", str(run.root)]
    assert main([*arguments, "--set", f"corpus.sources.0.path={data}"]) == 0
    assert "prepare: set aside 1 row: 1 bad_json" in shown(run, capsys, 0)


def test_a_directory_that_cannot_be_written_is_read(run, capsys):
    for path in (run.root, *run.root.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        assert look(run).state == "finished"
        shown(run, capsys, 0)
    finally:
        for path in (run.root, *run.root.rglob("*")):
            path.chmod(0o755)


def test_what_is_no_run_directory_is_refused(tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "recipe.yaml").write_text("eggs: 2\n")
    for name, why in (("none", "no such folder"), ("file", "no such"), ("photos", "not a run")):
        assert main(["status", str(tmp_path / name)]) == 2
        assert why in capsys.readouterr().err
        assert main(["status", str(tmp_path / name), "--json"]) == 2
        assert capsys.readouterr().out == ""


def test_at_work_without_a_word_of_who_or_what(run, untrained):
    with owned(untrained.root, "paceline train"):
        status = look(untrained)
        assert (status.state, states(status)["train"]) == ("running", "running")
        assert "No word of it yet" in status.stages[3].detail
        os.truncate(untrained.root / LOCK, 0)
        assert (look(untrained).state, look(untrained).owner) == ("running", None)
    assert look(untrained).state == "partial"


def test_looking_keeps_nobody_out(run):
    stop = threading.Event()

    def watch() -> None:
        while not stop.is_set():
            run_status(run.root)

    watchers = [threading.Thread(target=watch) for _ in range(2)]
    for watcher in watchers:
        watcher.start()
    try:
        for _ in range(40):
            with owned(run.root, "paceline run"):
                pass
    finally:
        stop.set()
        for watcher in watchers:
            watcher.join()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_cut_anywhere_an_event_file_gives_an_answer(killed, straight, data):
    """The last line half-written, or all of it gone: in a finished and in a dead run."""
    run = data.draw(st.sampled_from([killed[0], RunDir(straight[1])]))
    stage = data.draw(st.sampled_from([s for s in STAGES if (run.events / f"{s}.jsonl").exists()]))
    path = run.events / f"{stage}.jsonl"
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    try:
        flipped = bytearray(whole[:cut])
        for place in data.draw(st.lists(st.integers(0, max(0, cut - 1)), max_size=3)):
            flipped[place : place + 1] = data.draw(st.binary(min_size=1, max_size=1))
        path.write_bytes(flipped)
        assert msgspec.json.encode(run_status(run.root)), "damage on top: an answer, at least"
        path.write_bytes(whole[:cut])
        status = run_status(run.root)
        assert msgspec.json.encode(status)
        heard = status.stages[STAGES.index(stage)]
        full = [json.loads(line) for line in whole[:cut].splitlines() if _is_json(line)]
        counted = [event for event in full if event["kind"] in COUNTED]
        if heard.state == "finished":
            # What completed it counts, or the record.
            counted = [event for event in counted if event["kind"] == "finished"]
        if counted:
            assert heard.counts.done == counted[-1]["done"]
        assert heard.heard == (full[-1]["t"] if full else None)
    finally:
        path.write_bytes(whole)


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _sessions(lines: list[dict]) -> Iterator[list[dict]]:
    """Events from each `start` on."""
    starts = [n for n, event in enumerate(lines) if event["kind"] == "start"]
    for begin, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        yield lines[begin:end]


@pytest.mark.parametrize("stage", STAGES)
def test_the_events_of_every_stage_have_the_one_vocabulary(straight, killed, stage):
    for run in (RunDir(straight[1]), killed[0]):
        if not (run.events / f"{stage}.jsonl").exists():
            continue
        lines = events(run, stage)
        assert {event["kind"] for event in lines} <= set(get_args(Kind))
        for event in lines:
            assert (event["v"], event["role"]) == (2, stage)
            assert {"t", "pid", "host", "elapsed"} <= event.keys()
        for session in _sessions(lines):
            counted = [event for event in session if event["kind"] in COUNTED]
            counts = [msgspec.convert(event, Counts) for event in counted]
            assert all(set(Counts.__dataclass_fields__) <= event.keys() for event in counted)
            assert [c.done for c in counts] == sorted(c.done for c in counts)
            assert all(c.skipped <= c.done <= (c.total or c.done) for c in counts)
            assert len({c.unit for c in counts}) == 1
    (finished,) = [e for e in events(RunDir(straight[1]), stage) if e["kind"] == "finished"]
    record = read_record(folder_of(stage, RunDir(straight[1])), stage)
    assert finished["report"] == record.report
    assert finished["done"] == finished["total"]


JSON_KEYS = {
    "run": "schema_version root name state now owner died stages notes next command",
    "owner": "pid host since doing",
    "stage": "name state detail counts seconds heard ended pid host training extraction tau "
    "report notes",
    "counts": "unit total done skipped redone redone_unit failed quarantined tokens tokens_total "
    "rate eta",
    "training": (
        "step loss learning_rate tau tau_step checkpoints newest resumes_from best parent online"
    ),
    "extraction": "state units units_done units_skipped workers waiting stuck staging_bytes "
    "staging_limit backlog_units backlog_bytes uploaded_bytes upload_cpu_share stall_seconds "
    "free_bytes samples_per_s part",
}


def test_the_keys_of_the_json_are_frozen(killed, capsys):
    """Scripts read them: add some, never rename or remove one."""
    assert main(["status", str(killed[0].root), "--json"]) == 1
    status = json.loads(capsys.readouterr().out)
    train = status["stages"][3]
    found = {
        "run": status,
        "owner": status["died"],
        "stage": train,
        "counts": train["counts"],
        "training": train["training"],
        "extraction": status["stages"][2]["extraction"],
    }
    assert {name: " ".join(part) for name, part in found.items()} == JSON_KEYS


COLD = """
import sys
from paceline.cli.main import main
code = main(sys.argv[1:])
heavy = sorted({"torch", "transformers", "numpy", "tokenizers", "safetensors"} & sys.modules.keys())
sys.exit(f"imported {heavy}" if heavy else code)
"""


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_status_imports_nothing_heavy(straight, flags):
    done = subprocess.run(
        [sys.executable, "-c", COLD, "status", str(straight[1]), *flags],
        env={**os.environ, "PYTHONPATH": str(Path(paceline.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_terminal_gets_the_same_numbers(run, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["status", str(run.root)]) == 0
    text = capsys.readouterr().out
    for words in ("19 of 19 rows", "26 of 26 samples", "finished", "next: Nothing is left"):
        assert words in text


def test_numbers_and_spans_in_words():
    assert [number(n) for n in (0, 7, 7.25, 1234, 12_345_678, 3e9)] == [
        "0", "7", "7.2", "1,234", "12.3 M", "3.0 G",
    ]  # fmt: skip
    assert [span(s) for s in (-3, 0.44, 59.6, 3600, 7800, 270_000)] == [
        "0.0s", "0.4s", "1m00s", "1h00m", "2h10m", "3d03h",
    ]  # fmt: skip


def test_a_run_that_is_gone_while_it_is_looked_at_is_an_error_in_words(tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        run_status(tmp_path / "gone")


def test_after_a_refused_attempt_a_success_clears_the_note_and_the_numbers_are_of_the_work(
    straight, tmp_path
):
    """The times are of the process that did the work, whatever was asked of the run since."""
    recipe, finished = straight
    run = RunDir(shutil.copytree(finished, tmp_path / "run"))
    before = {s.name: s for s in run_status(run.root).stages}
    assert main(["score", str(recipe), "--run", str(run.root), "--set", "train.gamma=3"]) == 2
    refused = {s.name: s for s in run_status(run.root).stages}
    assert any("ended early" in note for note in refused["score"].notes)
    assert refused["score"].seconds == before["score"].seconds
    assert refused["score"].counts == before["score"].counts
    assert main(["run", str(recipe), "--run", str(run.root)]) == 0
    after = {s.name: s for s in run_status(run.root).stages}
    assert not any("ended early" in note for stage in after.values() for note in stage.notes)
    for name, stage in after.items():
        assert (stage.state, stage.seconds) == ("finished", before[name].seconds)
