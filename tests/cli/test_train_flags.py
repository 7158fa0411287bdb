"""`--resume-from` and `--allow-change` as they are typed, and what a later score makes of them."""

import json
import shutil
from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.recipe.checkpoints import checkpoints, write_evaluation
from paceline.recipe.load import load_recipe
from paceline.recipe.run_dir import RunDir
from paceline.recipe.stage import read_record
from tiny_run import tiny_project
from training_runs import contents, events


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A project, and in it a run of all stages."""
    root = tmp_path_factory.mktemp("finished")
    tiny_project(root)
    assert main(["run", str(root / "recipe.yaml"), "--run", str(root / "run")]) == 0
    return root


@pytest.fixture
def run(finished, tmp_path) -> RunDir:
    return RunDir(shutil.copytree(finished / "run", tmp_path / "run"))


def go(command: str, run: RunDir, finished: Path, *arguments: str) -> int:
    return main([command, str(finished / "recipe.yaml"), "--run", str(run.root), *arguments])


def result(run: RunDir) -> dict:
    return json.loads((run.score / "result.json").read_bytes())


@pytest.mark.parametrize("command", ["train", "run"])
def test_a_finished_run_is_trained_further_and_scored_anew(run, finished, command, capsys):
    before = result(run)
    longer = ("--set", "train.epochs=4", "--allow-change", "train.epochs")
    assert go(command, run, finished, *longer[:2]) == 2
    assert "`--allow-change train.epochs`" in capsys.readouterr().err
    assert go(command, run, finished, *longer) == 0
    assert [e["key"] for e in events(run, "override")] == ["train.epochs"]
    assert load_recipe(run.recipe).train.epochs == 4
    if command == "train":
        assert go("score", run, finished) == 2
        err = capsys.readouterr().err
        assert "train.epochs: 4.0 -> 2.0" in err
        assert main(["score", "--run", str(run.root)]) == 0
    after = result(run)
    record = read_record(run.checkpoints, "train")
    assert record is not None
    (kept,) = run.score.glob("result-*.json")
    if after["provenance"]["drafter"] != before["provenance"]["drafter"]:
        assert json.loads(kept.read_bytes()) == before
    assert main(["run", "--run", str(run.root)]) == 0
    assert "nothing to do: score is complete" in capsys.readouterr().out


def test_an_older_checkpoint_is_taken_up_by_name(run, finished, capsys):
    first, *_ = checkpoints(run.checkpoints)
    weights = contents(run.checkpoints)
    assert go("train", run, finished, "--resume-from", first.name) == 0
    for folder in checkpoints(run.checkpoints):
        name = f"{folder.name}/model.safetensors"
        assert (run.checkpoints / name).read_bytes() == weights[name]
    assert list(run.checkpoints.glob("*.aside"))
    assert go("score", run, finished) == 0
    assert "nothing to do" in capsys.readouterr().out, "the same drafter"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--allow-change", "train.lerning_rate"), 2, "Did you mean train.learning_rate?"),
        (("--allow-change", "train.seed"), 2, "the order of the samples"),
        (("--resume-from", "step_999998"), 2, "no such folder"),
    ],
)
@pytest.mark.parametrize("command", ["train", "run"])
def test_what_cannot_be_is_refused_and_nothing_touched(
    run, finished, capsys, command, arguments, code, said
):
    before = {p: p.read_bytes() for p in run.root.rglob("*.*") if p.parent != run.events}
    assert go(command, run, finished, *arguments) == code
    err = capsys.readouterr().err
    assert said in err
    assert "Traceback" not in err
    assert before == {p: p.read_bytes() for p in before}


def test_t_71_a_damaged_checkpoint_that_is_asked_for_exits_with_1(run, finished, capsys):
    first, *_ = checkpoints(run.checkpoints)
    path = first / "optimizer.safetensors"
    path.write_bytes(b"")
    assert go("train", run, finished, "--resume-from", first.name) == 1
    err = capsys.readouterr().err
    assert f"{path}: its checksum does not hold" in err
    assert "Traceback" not in err


def test_a_lost_best_checkpoint_is_named_by_score_and_train_chooses_the_next(
    run, finished, capsys, caplog
):
    record = read_record(run.checkpoints, "train")
    assert record is not None
    best = run.checkpoints / record.report["best"]
    others = [f for f in checkpoints(run.checkpoints) if f != best]
    newest = checkpoints(run.checkpoints)[-1]
    if best == newest:
        # Make the older one the best that was recorded, as a better τ would have.
        lower_tau(newest)
        assert go("train", run, finished, "--resume-from", newest.name) == 0
        best, others = others[0], [newest]
        assert read_record(run.checkpoints, "train").report["best"] == best.name
        assert go("score", run, finished) == 0
    path = best / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    capsys.readouterr()
    assert go("score", run, finished) == 1
    err = capsys.readouterr().err
    assert f"{path}: missing, or not as `paceline train` wrote it. Run `paceline train`" in err
    assert go("train", run, finished) == 0
    assert "It was the best checkpoint" in caplog.text
    assert read_record(run.checkpoints, "train").report["best"] in {f.name for f in others}
    assert go("score", run, finished) == 0


def lower_tau(folder: Path) -> None:
    """Let a checkpoint look like the worst, as if it had been measured."""
    write_evaluation(folder, {"ddtree-64": 0.5}, 2)


@pytest.fixture
def sibling(finished, tmp_path) -> RunDir:
    """A run with the same corpus and features, whose training has not begun."""
    run = RunDir(tmp_path / "sibling")
    for name in ("corpus", "features"):
        shutil.copytree(finished / "run" / name, run.root / name)
    return run


@pytest.mark.parametrize("command", ["train", "run"])
def test_a_run_is_forked_into_a_new_one_and_status_and_report_say_so(
    sibling, finished, command, capsys
):
    old = RunDir(finished / "run")
    before = contents(old.root)
    folder = checkpoints(old.checkpoints)[0]
    longer = ("--set", "train.epochs=4", "--fork-from", str(folder))
    assert go(command, sibling, finished, *longer) == 0
    said = capsys.readouterr().out
    words = f"forked from {old.root.resolve()}, {folder.name}"
    assert words in said
    assert min(e["step"] for e in events(sibling, "step")) == int(folder.name[5:]) + 1
    assert [e["key"] for e in events(sibling, "override")] == ["train.epochs"]
    assert main(["status", str(sibling.root), "--json"]) == 0
    stages = {s["name"]: s for s in json.loads(capsys.readouterr().out)["stages"]}
    parent = stages["train"]["training"]["parent"]
    assert (parent["run"], parent["name"]) == (str(old.root.resolve()), folder.name)
    assert main(["status", str(sibling.root)]) == 0
    assert words in " ".join(capsys.readouterr().out.split())
    assert main(["report", str(sibling.root)]) == 0
    assert words in sibling.report.read_text()
    capsys.readouterr()
    assert go(command, sibling, finished, *longer) == 0
    assert "train is complete" in capsys.readouterr().out
    assert contents(old.root) == before


def test_a_fork_is_refused_before_any_stage(sibling, run, finished, capsys):
    folder = checkpoints(run.checkpoints)[0]
    both = ("--fork-from", str(folder), "--resume-from", folder.name)
    assert go("run", sibling, finished, *both) == 2
    assert "--resume-from and --fork-from: one of them" in capsys.readouterr().err
    assert go("run", sibling, finished, "--fork-from", "") == 2
    assert "--fork-from: empty" in capsys.readouterr().err
    assert go("run", sibling, finished, "--fork-from", str(folder.with_name("step_7"))) == 2
    assert "no such folder" in capsys.readouterr().err
    other = checkpoints(RunDir(finished / "run").checkpoints)[0]
    assert go("run", run, finished, "--fork-from", str(other)) == 2
    assert "has checkpoints already" in capsys.readouterr().err
    (folder / "model.safetensors").unlink()
    assert go("run", sibling, finished, "--fork-from", str(folder)) == 1
    assert f"{folder / 'model.safetensors'}: missing" in capsys.readouterr().err
    assert not sibling.events.exists()
