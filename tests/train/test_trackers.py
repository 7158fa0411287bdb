"""A training that is shown elsewhere is the same training, and one run there."""

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from tensorboardX.proto import event_pb2

from paceline.durable.errors import Interrupted
from paceline.recipe.write import recipe_yaml
from paceline.trackers.fan_out import FILE, Trackers
from paceline.trackers.tensorboard import FOLDER
from paceline.train import stage
from paceline.train.checkpoint import read_state
from training_runs import assert_same_end, events, newest, step_events, stop_after


def scalars(path: Path, name: str) -> list[tuple[int, float]]:
    """The points of a curve in an event file."""
    data, found = path.read_bytes(), []
    while data:
        length = int.from_bytes(data[:8], "little")
        event = event_pb2.Event.FromString(data[12 : 12 + length])
        found += [(event.step, v.simple_value) for v in event.summary.value if v.tag == name]
        data = data[16 + length :]
    return found


def test_the_curves_are_those_of_the_events(fresh_run, caplog):
    recipe, run_dir = fresh_run(trackers=("tensorboard",))
    report = stage.run(recipe, run_dir)
    (path,) = (run_dir.root / FOLDER).iterdir()
    steps = step_events(run_dir)
    assert len(steps) == 14
    assert scalars(path, "train/loss") == [(e["step"], pytest.approx(e["loss"])) for e in steps]
    taus = [(e["step"], e["simulated_tau"]["chain"]) for e in events(run_dir, "evaluation")]
    assert scalars(path, "eval/tau/chain") == [(step, pytest.approx(tau)) for step, tau in taus]
    assert scalars(path, "report/parameters") == [(14, report.numbers["parameters"])]
    assert [r for r in caplog.records if r.name.startswith("paceline.trackers")] == []
    plain = fresh_run()
    stage.run(*plain)
    assert_same_end(plain[1], run_dir)


class Hangs:
    """As a server does that takes a connection and never answers."""

    def __init__(self, ever: threading.Event) -> None:
        self._ever = ever

    def start(self, *_: object) -> None:
        self._ever.wait(100)

    log = note = finish = start


class Refuses:
    def start(self, *_: object) -> None:
        raise ConnectionError("refused")

    log = note = finish = start


def test_trackers_that_fail_and_hang_change_no_bit(fresh_run, monkeypatch, caplog):
    ever = threading.Event()
    broken = {"wandb": Hangs(ever), "mlflow": Refuses()}
    plain, shown = fresh_run(), fresh_run(trackers=("wandb", "mlflow"))
    stage.run(*plain)
    monkeypatch.setattr(stage, "trackers_of", lambda *run: Trackers(broken, *run, wait=0.2))
    stage.run(*shown)
    ever.set()
    assert step_events(plain[1]) == step_events(shown[1])
    assert_same_end(plain[1], shown[1])
    said = [r.getMessage() for r in caplog.records if r.name.startswith("paceline.trackers")]
    assert [text.partition(":")[0] for text in said] == [
        "tracker mlflow", "tracker wandb", "tracker mlflow"
    ]  # fmt: skip


def test_a_resumed_run_is_one_run_on_one_axis(fresh_run, monkeypatch):
    recipe, run_dir = fresh_run(trackers=("tensorboard",))
    take_back = stop_after(monkeypatch, 6)
    with pytest.raises(Interrupted):
        stage.run(recipe, run_dir)
    take_back()
    kept = json.loads((run_dir.root / FILE).read_text())["id"]
    assert read_state(newest(run_dir)).tracker == kept
    # Only the checkpoints have come over to this machine.
    (run_dir.root / FILE).unlink()
    stage.run(recipe, run_dir)
    assert json.loads((run_dir.root / FILE).read_text())["id"] == kept
    assert read_state(newest(run_dir)).tracker == kept
    curves = [scalars(p, "train/loss") for p in sorted((run_dir.root / FOLDER).iterdir())]
    assert [[step for step, _ in curve] for curve in curves] == [
        list(range(1, 7)), list(range(7, 15))
    ]  # fmt: skip


def test_a_training_can_be_shown_from_its_middle_on(fresh_run, monkeypatch):
    """These keys change no result, so they need no permission."""
    recipe, run_dir = fresh_run()
    take_back = stop_after(monkeypatch, 6)
    with pytest.raises(Interrupted):
        stage.run(recipe, run_dir)
    take_back()
    assert read_state(newest(run_dir)).tracker == ""
    shown = replace(recipe, train=replace(recipe.train, trackers=("tensorboard",)))
    stage.run(shown, run_dir)
    (path,) = (run_dir.root / FOLDER).iterdir()
    assert [step for step, _ in scalars(path, "train/loss")] == list(range(7, 15))
    assert run_dir.recipe.read_text() == recipe_yaml(shown)


def test_a_complete_training_opens_no_run_again(fresh_run):
    recipe, run_dir = fresh_run(trackers=("tensorboard",))
    stage.run(recipe, run_dir)
    assert stage.run(recipe, run_dir).skipped
    assert len(list((run_dir.root / FOLDER).iterdir())) == 1
