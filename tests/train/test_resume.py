"""Stopped, damaged, taken up again: what goes on is the same training, or nothing goes on."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

import paceline
from paceline.durable.errors import (
    Interrupted,
    PacelineError,
    RecipeChanged,
    ShardDamaged,
    UserError,
)
from paceline.recipe.checkpoints import checkpoints
from paceline.recipe.fingerprint import digest_file
from paceline.recipe.run_dir import RunDir
from paceline.train import learner, loop, stage
from paceline.train.checkpoint import (
    NewerCheckpoint,
    newest_checkpoint,
    read_state,
    verify_checkpoint,
)
from training_runs import (
    assert_same_end,
    contents,
    events,
    newest,
    step_events,
    stop_after,
)

ACCUMULATION_OF_4 = {"batch_samples": 4, "micro_batch_tokens": 1}


@pytest.fixture(scope="module")
def finished(world, tmp_path_factory):
    """A finished training with three checkpoints: steps 5, 9 and 14."""
    recipe, root, _ = world
    recipe = replace(recipe, train=replace(recipe.train, keep_checkpoints=3))
    run = RunDir(tmp_path_factory.mktemp("finished") / "run")
    run.root.mkdir()
    for name in ("corpus", "features"):
        (run.root / name).symlink_to(root / name)
    stage.run(recipe, run)
    assert [f.name for f in checkpoints(run.checkpoints)] == [
        "step_000005", "step_000009", "step_000014",
    ]  # fmt: skip
    return recipe, run


@pytest.fixture
def copy(finished, tmp_path):
    recipe, run = finished
    shutil.copytree(run.root, tmp_path / "copy", symlinks=True)
    return recipe, RunDir(tmp_path / "copy")


def harm(folder: Path, kind: str) -> Path:
    """Damage a checkpoint; returns the file that an error has to name."""
    name = {
        "truncated weights": "model.safetensors",
        "empty optimizer": "optimizer.safetensors",
        "missing file": "rng.safetensors",
        "wrong checksum": "checksums.json",
        "flipped bit": "config.json",
        "no state": "state.json",
        "no checksums": "checksums.json",
        "empty checksums": "checksums.json",
        "missing key": "state.json",
    }[kind]
    path = folder / name
    data = path.read_bytes()
    match kind:
        case "truncated weights":
            path.write_bytes(data[: len(data) // 2])
        case "empty optimizer" | "empty checksums":
            path.write_bytes(b"")
        case "missing file" | "no checksums":
            path.unlink()
        case "wrong checksum":
            sums = json.loads(data)
            sums["model.safetensors"] = "0" + sums["model.safetensors"][1:] + "1"
            path.write_text(json.dumps(sums))
            return folder / "model.safetensors"
        case "flipped bit":
            path.write_bytes(data[:-9] + bytes([data[-9] ^ 4]) + data[-8:])
        case "no state":
            path.write_bytes(b"\xff{")
        case _:
            # As another version would have written it: its checksum holds.
            record = json.loads(data)
            del record["state"]["samples"]
            rewrite(folder, record)
    return path


def rewrite(folder: Path, record: object) -> None:
    """Another state file, with a checksum that holds."""
    path = folder / "state.json"
    path.write_bytes(msgspec.json.encode(record))
    sums = json.loads((folder / "checksums.json").read_bytes())
    sums["state.json"] = digest_file(path)
    (folder / "checksums.json").write_bytes(msgspec.json.encode(sums))


DAMAGES = [
    "truncated weights", "empty optimizer", "missing file", "wrong checksum", "flipped bit",
    "no state", "no checksums", "empty checksums", "missing key",
]  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGES)
def test_t_71_a_damaged_newest_checkpoint_is_passed_over(copy, finished, caplog, kind):
    caplog.set_level("INFO", "paceline")
    recipe, run_dir = copy
    last = run_dir.checkpoints / "step_000014"
    named = harm(last, kind)
    with pytest.raises(ShardDamaged, match=re.escape(str(named))):
        verify_checkpoint(last)
    found, reasons = newest_checkpoint(run_dir.checkpoints)
    assert found == run_dir.checkpoints / "step_000009"
    assert str(named) in reasons[0]
    (run_dir.checkpoints / "train.stage.json").unlink()
    report = stage.run(recipe, run_dir)
    assert report.numbers["samples"] == 40
    assert f"passed over: {named}" in caplog.text
    assert "going on from step_000009" in caplog.text
    assert_same_end(run_dir, finished[1])


@pytest.mark.parametrize("place", ["state", "beside it"])
def test_the_checkpoint_of_a_newer_version_is_refused_and_no_older_one_taken(copy, finished, place):
    recipe, run_dir = copy
    last = run_dir.checkpoints / "step_000014"
    record = json.loads((last / "state.json").read_bytes())
    (record["state"] if place == "state" else record)["colour"] = 1
    record["written_by"] = "7.1.0"
    rewrite(last, record)
    (run_dir.checkpoints / "train.stage.json").unlink()
    before = contents(run_dir.checkpoints)
    for asked in (None, "step_000014"):
        with pytest.raises(NewerCheckpoint) as raised:
            stage.run(recipe, run_dir, resume_from=asked)
        assert raised.value.exit_code == 2
        assert f"{last / 'state.json'}: written by a newer Paceline (7.1.0)" in str(raised.value)
        assert "does not know colour" in str(raised.value)
    assert contents(run_dir.checkpoints) == before
    stage.run(recipe, run_dir, resume_from="step_000009")
    assert_same_end(run_dir, finished[1])
    assert (run_dir.checkpoints / "step_000014.aside").is_dir()


def test_a_checkpoint_says_who_wrote_it(finished):
    folder = newest(finished[1])
    assert json.loads((folder / "state.json").read_bytes())["written_by"] == paceline.__version__


@pytest.mark.parametrize("kind", DAMAGES)
def test_t_71_a_damaged_checkpoint_that_is_asked_for_is_an_error(copy, kind):
    recipe, run_dir = copy
    named = harm(run_dir.checkpoints / "step_000009", kind)
    before = contents(run_dir.checkpoints)
    with pytest.raises(ShardDamaged, match=re.escape(str(named))) as raised:
        stage.run(recipe, run_dir, resume_from="step_000009")
    assert raised.value.exit_code == 1
    assert "--resume-from step_000009" in str(raised.value)
    assert contents(run_dir.checkpoints) == before


def test_a_checkpoint_that_is_not_there_is_an_error_with_those_that_are(copy):
    recipe, run_dir = copy
    before = contents(run_dir.checkpoints)
    with pytest.raises(UserError, match=r"step_000005, step_000009, step_000014") as raised:
        stage.run(recipe, run_dir, resume_from="step_000010")
    assert raised.value.exit_code == 2
    assert contents(run_dir.checkpoints) == before


def test_a_checkpoint_of_another_training_is_an_error(copy, fresh_run):
    recipe, run_dir = copy
    other, elsewhere = fresh_run(learning_rate=5e-4, evaluations=1)
    stage.run(other, elsewhere)
    before = contents(run_dir.checkpoints)
    with pytest.raises(RecipeChanged, match="a checkpoint of another training") as raised:
        stage.run(recipe, run_dir, resume_from=str(newest(elsewhere)))
    assert "\n  train.learning_rate: 0.0005 -> 0.001\n" in str(raised.value)
    assert contents(run_dir.checkpoints) == before


def test_an_older_checkpoint_is_taken_up_again_and_newer_ones_are_set_aside(copy, finished, caplog):
    recipe, run_dir = copy
    aside = contents(run_dir.checkpoints / "step_000009")
    report = stage.run(recipe, run_dir, resume_from="step_000005")
    assert not report.skipped
    assert contents(run_dir.checkpoints / "step_000009.aside") == aside
    assert "step_000014 is set aside as step_000014.aside" in caplog.text
    assert_same_end(run_dir, finished[1])
    assert [e["step"] for e in events(run_dir, "start")] == [0, 5]
    assert stage.run(recipe, run_dir).skipped, "finished again"
    stage.run(recipe, run_dir, resume_from="step_000009")
    assert (run_dir.checkpoints / "step_000014.2.aside").is_dir()


def test_one_that_was_set_aside_or_lies_elsewhere_can_be_taken_up(copy, finished, tmp_path):
    recipe, run_dir = copy
    stage.run(recipe, run_dir, resume_from="step_000005")
    kept = contents(run_dir.checkpoints / "step_000009.aside")
    stage.run(recipe, run_dir, resume_from="step_000009.aside")
    assert contents(run_dir.checkpoints / "step_000009.aside") == kept
    assert contents(run_dir.checkpoints / "step_000009") == kept
    assert_same_end(run_dir, finished[1])
    away = shutil.move(run_dir.checkpoints / "step_000005", tmp_path / "away")
    stage.run(recipe, run_dir, resume_from=str(away))
    assert_same_end(run_dir, finished[1])


def test_a_stop_after_resume_from_tells_to_leave_it_out(copy, finished, monkeypatch):
    recipe, run_dir = copy
    undo = stop_after(monkeypatch, 7)
    with pytest.raises(Interrupted, match="leave --resume-from out"):
        stage.run(recipe, run_dir, resume_from="step_000005")
    undo()
    stage.run(recipe, run_dir)
    assert_same_end(run_dir, finished[1])


def test_the_millionth_step_is_newer_than_the_one_before(copy):
    _, run_dir = copy
    (run_dir.checkpoints / "step_000014").rename(run_dir.checkpoints / "step_999999")
    (run_dir.checkpoints / "step_000009").rename(run_dir.checkpoints / "step_1000000")
    assert newest_checkpoint(run_dir.checkpoints)[0] == run_dir.checkpoints / "step_1000000"


@pytest.mark.parametrize(
    ("stop", "changes"),
    [
        (1, {}),
        (7, {}),
        (11, {}),
        (10, {"batch_samples": 2}),
        (3, ACCUMULATION_OF_4),
        (6, ACCUMULATION_OF_4 | {"schedule": "wsd"}),
        (4, {"compute": "bfloat16"}),
    ],
)
def test_t_72_stopped_and_resumed_equals_uninterrupted(fresh_run, monkeypatch, stop, changes):
    """Step 10 of 20 ends an epoch, the others lie inside one: 20 samples are no multiple of 3."""
    recipe, straight = fresh_run(**changes)
    consumed = observe_samples(monkeypatch)
    stage.run(recipe, straight)
    wanted = consumed.copy()
    consumed.clear()
    assert len(wanted) == 40
    _, stopped = fresh_run()
    undo = stop_after(monkeypatch, stop)
    with pytest.raises(Interrupted, match="The same command goes on"):
        stage.run(recipe, stopped)
    assert read_state(newest(stopped)).step == stop
    undo()
    stage.run(recipe, stopped)
    assert consumed == wanted, "the same samples in the same order"
    assert step_events(straight) == step_events(stopped)
    assert len(events(stopped, "step")) == len(events(straight, "step"))
    assert_same_end(straight, stopped)


def test_t_72_a_stop_inside_an_accumulation_goes_on_at_the_last_step(fresh_run, monkeypatch):
    recipe, straight = fresh_run(**ACCUMULATION_OF_4)
    stage.run(recipe, straight)
    _, stopped = fresh_run()
    original = learner.block_loss
    calls = 0

    def cut_off(*arguments, **keywords):
        nonlocal calls
        calls += 1
        if calls == 4 * 5 + 3:
            raise KeyboardInterrupt
        return original(*arguments, **keywords)

    monkeypatch.setattr(learner, "block_loss", cut_off)
    with pytest.raises(KeyboardInterrupt):
        stage.run(recipe, stopped)
    monkeypatch.setattr(learner, "block_loss", original)
    assert read_state(newest(stopped)).step == 4, "the last checkpoint; step 6 was never done"
    stage.run(recipe, stopped)
    assert step_events(straight) == step_events(stopped)
    assert_same_end(straight, stopped)


def observe_samples(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids of the samples whose steps were done, in order."""
    consumed: list[str] = []
    original = loop.Trainer._report

    def report(self, sums, *arguments):
        consumed.extend(sums.sample_ids)
        original(self, sums, *arguments)

    monkeypatch.setattr(loop.Trainer, "_report", report)
    return consumed


def test_the_generators_go_on_where_they_were(fresh_run, monkeypatch):
    """With a loss that draws from torch's generator, as dropout would."""
    original = learner.block_loss

    def noisy(*arguments, **keywords):
        result = original(*arguments, **keywords)
        return replace(result, sum=result.sum * (0.5 + torch.rand(())))

    monkeypatch.setattr(learner, "block_loss", noisy)
    recipe, straight = fresh_run()
    torch.manual_seed(1)
    outside = torch.get_rng_state()
    stage.run(recipe, straight)
    assert torch.equal(torch.get_rng_state(), outside), "the process's own generator is left alone"
    _, stopped = fresh_run()
    torch.manual_seed(2)
    undo = stop_after(monkeypatch, 6)
    with pytest.raises(Interrupted):
        stage.run(recipe, stopped)
    undo()
    torch.manual_seed(3)
    stage.run(recipe, stopped)
    assert step_events(straight) == step_events(stopped)
    assert_same_end(straight, stopped)


def test_an_evaluation_comes_before_the_first_step_and_leaves_no_trace(fresh_run, monkeypatch):
    recipe, run_dir = fresh_run()
    undo = stop_after(monkeypatch, 3)
    with pytest.raises(Interrupted):
        stage.run(recipe, run_dir)
    assert read_state(newest(run_dir)).tau == {}
    undo()
    stage.run(recipe, run_dir)
    found = events(run_dir, "evaluation")
    assert [e["step"] for e in found] == [0, 5, 9, 14], "once, before the training's first step"
    assert found[0]["simulated_tau"].keys() == {"chain", "ddtree-16", "ddtree-64"}
    assert all(1.0 <= tau <= 4.0 for tau in found[0]["simulated_tau"].values())
    assert "step_000000" not in {f.name for f in checkpoints(run_dir.checkpoints)}
    _, other = fresh_run()
    stage.run(recipe, other)
    assert events(other, "evaluation")[0]["simulated_tau"] == found[0]["simulated_tau"]


def test_a_damaged_best_checkpoint_that_is_not_the_newest_gives_way_to_the_next(copy, caplog):
    recipe, run_dir = copy
    lift(run_dir.checkpoints / "step_000005")
    assert stage.run(recipe, run_dir, resume_from="step_000014").numbers["best"] == "step_000005"
    caplog.clear()
    named = harm(run_dir.checkpoints / "step_000005", "truncated weights")
    report = stage.run(recipe, run_dir)
    assert not report.skipped
    assert report.numbers["best"] in ("step_000009", "step_000014")
    assert f"{named}: its checksum does not hold. It was the best" in caplog.text
    assert stage.run(recipe, run_dir).skipped


def lift(folder: Path) -> None:
    """Give a checkpoint the highest τ, as earlier releases did: in its state."""
    record = json.loads((folder / "state.json").read_bytes())
    record["state"]["tau"] = {"ddtree-64": 3.9}
    rewrite(folder, record)


def test_every_error_of_a_resume_has_an_exit_code():
    assert all(issubclass(e, PacelineError) for e in (ShardDamaged, UserError, RecipeChanged))
