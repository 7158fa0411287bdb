"""Trackers that fail, hang, end their thread or are missing: told once, and never raised."""

import json
import logging
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import Recipe, TrainRecipe
from paceline.trackers.fan_out import FILE, Trackers, trackers_of
from paceline.trackers.lane import Lane
from paceline.trackers.tracker import RunIdentity, Tracker
from paceline.watch.events import Counts, EventWriter

RECIPE = Recipe(train=TrainRecipe(trackers=("wandb",), tracker_project="trial"))


class Recorder:
    """A tracker that keeps what it is told; `fault` is called first with each call's name."""

    def __init__(self, fault: Any = lambda _: None) -> None:
        self.fault = fault
        self.run: RunIdentity | None = None
        self.config: dict[str, Any] = {}
        self.points: list[tuple[int, dict[str, float]]] = []
        self.notes: list[tuple[int, str]] = []
        self.outcome = ""

    def start(self, run: RunIdentity, config: dict[str, Any]) -> None:
        self.fault("start")
        self.run, self.config = run, config

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.fault("log")
        self.points.append((step, metrics))

    def note(self, step: int, text: str) -> None:
        self.fault("note")
        self.notes.append((step, text))

    def finish(self, outcome: str) -> None:
        self.fault("finish")
        self.outcome = outcome


def train(run_dir: RunDir, *trackers: Tracker, first: int = 0, last: int = 4, **settings) -> float:
    """Emit what a training does; returns the seconds that it took up to its end."""
    run_dir.root.mkdir(exist_ok=True)
    named = {f"tracker{n}": tracker for n, tracker in enumerate(trackers)}
    with (
        Trackers(named, RECIPE, run_dir, **settings) as fan_out,
        EventWriter(run_dir.events, "train", listener=fan_out.hear) as events,
    ):
        events.emit("override", key="train.epochs", made=1.0, asked=2.0, step=first)
        fan_out.claim()
        began = time.monotonic()
        counts = Counts(unit="samples", total=12, done=3 * first, tokens=7, rate=5.5)
        events.emit("start", counts, step=first)
        for step in range(first + 1, last):
            parts = {"right": 3.0, "right_count": 4.0, "first_right": 1.0, "first_right_count": 2.0}
            events.emit(
                "step", counts, step=step, samples=3 * step, loss=1 / step, count=9.0,
                learning_rate=1e-3, gradient_norm=0.5, empty_samples=0, **parts,
            )  # fmt: skip
        set_aside = replace(counts, quarantined={"skipped_step": 3})
        events.emit(
            "skipped_step", set_aside, step=last, samples=3 * last, loss=float("nan"),
            learning_rate=1e-3, gradient_norm=None, reason="loss or gradient is not finite",
        )  # fmt: skip
        events.emit("evaluation", step=last, simulated_tau={"chain": 1.5, "ddtree-64": 2.5})
        report = {"best": "step_000004", "simulated_tau": {"chain": 1.5}, "steps": last}
        events.emit("finished", counts, step=last, report={**report, "remarks": ["fine"]})
        # The end, which may wait for trackers, comes behind.
        return time.monotonic() - began
    raise AssertionError


@pytest.fixture
def run_dir(tmp_path) -> RunDir:
    return RunDir(tmp_path / "demo")


def end_with(error: BaseException, recorder: Recorder, run_dir: RunDir, *told: Any) -> None:
    """Emit one event, and end the stage with an error."""
    run_dir.root.mkdir()
    with (
        Trackers({"wandb": recorder}, RECIPE, run_dir) as fan_out,
        EventWriter(run_dir.events, "train", listener=fan_out.hear) as events,
    ):
        kind, counts, fields = told
        events.emit(kind, counts, **fields)
        raise error


def warnings(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_every_event_reaches_the_curves(run_dir, caplog):
    recorder = Recorder()
    train(run_dir, recorder)
    assert recorder.run is not None
    assert recorder.run.project == "trial"
    assert recorder.run.name == f"demo-{recorder.run.id[:8]}"
    assert recorder.config["train"]["trackers"] == ["wandb"]
    points = {}
    for step, metrics in recorder.points:
        points.setdefault(step, {}).update(metrics)
    assert list(points) == [1, 2, 3, 4]
    assert points[2] == {
        "train/loss": 0.5, "train/learning_rate": 1e-3, "train/gradient_norm": 0.5,
        "train/samples": 6, "train/tokens": 7, "train/tokens_per_s": 5.5,
        "train/skipped_samples": 0, "train/right": 0.75, "train/first_right": 0.5,
    }  # fmt: skip
    assert "train/loss" not in points[4], "it was no number"
    assert points[4]["train/skipped_samples"] == 3
    assert points[4]["eval/tau/ddtree-64"] == 2.5
    assert points[4]["report/simulated_tau.chain"] == 1.5
    assert recorder.notes == [
        (0, "train.epochs changes from 1.0 to 2.0 at step 0"),
        (4, "step 4 changed nothing: loss or gradient is not finite"),
        (4, "best checkpoint: step_000004"),
    ]
    assert recorder.outcome == "finished"
    assert warnings(caplog) == []


def test_a_resumed_run_is_the_same_run_from_the_step_where_it_goes_on(run_dir):
    one, other = Recorder(), Recorder()
    train(run_dir, one)
    train(run_dir, other, first=2, last=6)
    assert one.run is not None
    assert other.run == replace(one.run, step=2)
    assert [step for step, _ in other.points] == [3, 4, 5, 6, 6, 6]
    assert json.loads((run_dir.root / FILE).read_text()) == {"id": one.run.id}


def test_the_id_comes_from_the_file_then_from_the_checkpoint_then_is_new(run_dir, caplog):
    run_dir.root.mkdir()
    trackers = trackers_of(RECIPE, run_dir)
    assert trackers.claim("a" * 32) == "a" * 32
    assert trackers_of(RECIPE, run_dir).claim("b" * 32) == "a" * 32
    (run_dir.root / FILE).write_text('{"id": 5')
    assert trackers_of(RECIPE, run_dir).claim("b" * 32) == "b" * 32
    assert f"{run_dir.root / FILE}: not what was written there" in warnings(caplog)[0]
    (run_dir.root / FILE).unlink()
    fresh = {trackers_of(RECIPE, RunDir(run_dir.root)).claim() for _ in range(2)}
    assert len(fresh) == 1


def test_without_a_tracker_there_is_no_file_and_the_checkpoint_keeps_its_id(run_dir):
    run_dir.root.mkdir()
    assert trackers_of(Recipe(), run_dir).claim("a" * 32) == "a" * 32
    assert list(run_dir.root.iterdir()) == []


def test_an_id_that_cannot_be_written_is_a_warning(run_dir, caplog):
    (run_dir.root / FILE).mkdir(parents=True)
    assert len(trackers_of(RECIPE, run_dir).claim()) == 32
    assert any("cannot be written" in text for text in warnings(caplog))


def test_a_training_that_is_refused_or_complete_starts_no_tracker(run_dir):
    recorder = Recorder()
    with pytest.raises(ValueError, match="refused"):
        end_with(ValueError("refused"), recorder, run_dir, "redo", None, {"name": "x"})
    assert recorder.run is None
    assert not (run_dir.root / FILE).exists()


@pytest.mark.parametrize("error", [RuntimeError("no answer of https://me:pw@host"), SystemExit(3)])
@pytest.mark.parametrize("call", ["start", "log", "note", "finish"])
def test_a_failure_is_one_warning_and_the_other_tracker_has_all(run_dir, caplog, call, error):
    def fault(name: str) -> None:
        if name == call:
            raise error

    broken, sound = Recorder(fault), Recorder()
    train(run_dir, broken, sound, retry=0.01)
    assert len(sound.points) == 6
    assert sound.outcome == "finished"
    kinds = [text for text in warnings(caplog) if "failed (" in text]
    assert len(kinds) == 1
    assert "tracker tracker0" in kinds[0]
    assert "The training goes on." in kinds[0]
    assert "pw" not in kinds[0]
    lost = [text for text in warnings(caplog) if "did not reach it" in text]
    assert len(lost) == (call != "finish")


def test_a_run_that_cannot_be_opened_is_opened_later_with_all_that_has_come(run_dir, caplog):
    attempts = []

    def fault(name: str) -> None:
        if name == "start":
            attempts.append(name)
            if len(attempts) < 3:
                raise ConnectionError("down")

    recorder = Recorder(fault)
    run = RunIdentity(id="a", name="n", project="p", folder=run_dir.root, step=0)
    lane = Lane("mlflow", recorder, run, {}, retry=0.02)
    for step in range(5):
        lane.log(step, {"x": 1.0})
    until = time.monotonic() + 20
    while len(recorder.points) < 5 and time.monotonic() < until:
        time.sleep(0.01)
    lane.end("finished")
    lane.join(20)
    assert [step for step, _ in recorder.points] == [0, 1, 2, 3, 4]
    assert recorder.outcome == "finished"
    assert len(warnings(caplog)) == 1


def test_a_missing_library_names_its_extra_and_is_not_tried_again(run_dir, caplog):
    def fault(name: str) -> None:
        raise ModuleNotFoundError("No module named 'wandb'", name="wandb")

    run = RunIdentity(id="a", name="n", project="p", folder=run_dir.root, step=0)
    lane = Lane("wandb", Recorder(fault), run, {})
    lane.log(1, {"x": 1.0})
    lane.join(20)
    lane.log(2, {"x": 1.0})
    (said,) = warnings(caplog)
    assert said == (
        "tracker wandb: not installed, so nothing is sent there. Run `pip install "
        "'paceline[wandb]'`. The training goes on."
    )


@pytest.mark.parametrize("call", ["start", "log", "finish"])
def test_a_call_that_hangs_holds_up_nothing(run_dir, caplog, call):
    ever = threading.Event()

    def fault(name: str) -> None:
        if name == call:
            ever.wait(60)

    hanging, sound = Recorder(fault), Recorder()
    began = time.monotonic()
    took = train(run_dir, hanging, sound, last=300, wait=0.5)
    whole = time.monotonic() - began
    ever.set()
    assert took < 10
    assert whole < took + 5, "the end waits no longer than it may"
    assert sound.outcome == "finished"
    assert len(sound.points) == 302
    assert len([t for t in warnings(caplog) if "still at work" in t]) == 1


def test_what_does_not_fit_goes_from_the_old_end_with_one_warning(run_dir, caplog):
    may_go_on = threading.Event()
    recorder = Recorder(lambda name: may_go_on.wait(60) if name == "start" else None)
    run = RunIdentity(id="a", name="n", project="p", folder=run_dir.root, step=0)
    lane = Lane("wandb", recorder, run, {}, queue=10)
    for step in range(100):
        lane.log(step, {"x": 1.0})
    may_go_on.set()
    lane.end("finished")
    lane.join(20)
    assert [step for step, _ in recorder.points] == list(range(90, 100))
    full, lost = warnings(caplog)
    assert "it does not keep up" in full
    assert "90 calls did not reach it" in lost


@pytest.mark.parametrize(
    ("error", "outcome"), [(KeyboardInterrupt(), "interrupted"), (OSError("disk"), "failed")]
)
def test_the_outcome_is_how_the_stage_ended(run_dir, error, outcome):
    recorder = Recorder()
    with pytest.raises(type(error)):
        end_with(error, recorder, run_dir, "start", Counts(unit="samples"), {"step": 7})
    assert recorder.outcome == outcome
    (note,) = recorder.notes
    assert note[0] == 7
    assert note[1].startswith(f"{outcome}: ")
