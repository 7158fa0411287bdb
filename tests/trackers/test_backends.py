"""Each real library where it is installed: one run, stopped and resumed from an earlier step."""

import importlib.util
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from checkout import ROOT
from paceline.trackers.tensorboard import FOLDER, TensorBoard
from paceline.trackers.tracker import RunIdentity

ID = "5" * 32
CONFIG = {"name": "demo", "train": {"betas": [0.9, 0.95], "shard_window": None}}

# In processes of their own: these libraries keep threads, services and settings to their end.
DRIVE = """
import json, sys
from pathlib import Path
from paceline.trackers.mlflow import MLflow
from paceline.trackers.tracker import RunIdentity
from paceline.trackers.trackio import Trackio
from paceline.trackers.wandb import Wandb
name, folder, step, config = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
tracker = {
    "wandb": lambda: Wandb({"mode": "offline"}),
    "trackio": lambda: Trackio({}),
    "mlflow": lambda: MLflow({"tracking_uri": f"sqlite:///{folder}/ml.db"}),
}[name]()
run = RunIdentity(id="5" * 32, name="demo-55555555", project="trial", folder=folder, step=step)
tracker.start(run, json.loads(config))
for at in range(step + 1, step + 6):
    tracker.log(at, {"train/loss": float(at), "eval/tau/ddtree-64": 2.5})
tracker.note(step + 5, "seen")
tracker.finish("finished" if step else "interrupted")
"""

READ_MLFLOW = """
import json, sys
from mlflow import MlflowClient
client = MlflowClient(tracking_uri=f"sqlite:///{sys.argv[1]}/ml.db")
found = client.get_experiment_by_name("trial")
(run,) = client.search_runs([found.experiment_id])
points = client.get_metric_history(run.info.run_id, "train/loss")
print(json.dumps({
    "status": run.info.status, "params": run.data.params, "note": run.data.tags["note.8"],
    "points": [[p.step, p.value] for p in points],
}))
"""

READ_TRACKIO = """
import json
from trackio.sqlite_storage import SQLiteStorage
rows = SQLiteStorage.get_logs("trial", "demo-55555555")
print(json.dumps({
    "runs": SQLiteStorage.get_runs("trial"),
    "points": [[r["step"], r["train/loss"]] for r in rows if "train/loss" in r],
    "notes": [[r["step"], r["note"]] for r in rows if "note" in r],
}))
"""

READ_WANDB = """
import json, sys
from wandb.proto.wandb_internal_pb2 import Record
found = []
for path in sys.argv[1:]:
    data, at, whole = open(path, "rb").read(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(data[at + 4:at + 6], "little"), data[at + 6]
        whole += data[at + 7:at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            record = Record()
            record.ParseFromString(whole)
            found.append(record)
            whole = b""
points, ids, axes, exits = [], set(), set(), []
for record in found:
    kind = record.WhichOneof("record_type")
    if kind == "history":
        items = {i.key or ".".join(i.nested_key): json.loads(i.value_json)
                 for i in record.history.item}
        if "train/loss" in items:
            points.append([items["step"], items["train/loss"]])
    elif kind == "run":
        ids.add(record.run.run_id)
    elif kind == "metric" and record.metric.step_metric:
        axes.add(record.metric.step_metric)
    elif kind == "exit":
        exits.append(record.exit.exit_code)
print(json.dumps({"points": points, "ids": list(ids), "axes": list(axes), "exits": exits}))
"""

TWICE = [[s, float(s)] for s in (1, 2, 3, 4, 5, 4, 5, 6, 7, 8)]
"""Points of a run that was stopped at step 5 and went on from the checkpoint at step 3."""


def python(text: str, folder: Path, *arguments: object) -> str:
    away = {"TRACKIO_DIR": str(folder / "trackio"), "HOME": str(folder), "WANDB_SILENT": "true"}
    away["PYTHONPATH"] = str(ROOT / "src")
    done = subprocess.run(
        [sys.executable, "-c", text, *map(str, arguments)],
        cwd=folder,
        env={**os.environ, **away},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def drive(name: str, folder: Path) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    for step in (0, 3):
        python(DRIVE, folder, name, folder, step, json.dumps(CONFIG))


def test_mlflow_goes_on_with_its_run(tmp_path):
    drive("mlflow", tmp_path)
    found = json.loads(python(READ_MLFLOW, tmp_path, tmp_path).splitlines()[-1])
    assert sorted(found["points"]) == sorted(TWICE)
    assert found["status"] == "FINISHED"
    assert found["note"] == "seen"
    assert found["params"]["train.betas.0"] == "0.9"


def test_trackio_goes_on_with_its_run(tmp_path):
    drive("trackio", tmp_path)
    found = json.loads(python(READ_TRACKIO, tmp_path).splitlines()[-1])
    assert found["runs"] == ["demo-55555555"]
    assert sorted(found["points"]) == sorted(TWICE)
    assert found["notes"] == [[5, "seen"], [8, "seen"]]


def test_wandb_goes_on_with_its_run(tmp_path):
    drive("wandb", tmp_path)
    files = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2
    found = json.loads(python(READ_WANDB, tmp_path, *files).splitlines()[-1])
    assert found["points"] == TWICE
    assert (found["ids"], found["axes"]) == ([ID], ["step"])
    assert found["exits"] == [1, 0]


def records(path: Path) -> list:
    """The events of a file, by its own framing: length, its sum, data, their sum."""
    from tensorboardX.proto import event_pb2

    data, found = path.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        found.append(event_pb2.Event.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    return found


def tell(folder: Path, step: int) -> None:
    tracker = TensorBoard()
    tracker.start(RunIdentity(id=ID, name="demo", project="p", folder=folder, step=step), CONFIG)
    for at in range(step + 1, step + 6):
        tracker.log(at, {"train/loss": float(at)})
    tracker.note(step + 5, "seen")
    tracker.finish("finished" if step else "interrupted")


@pytest.fixture
def told(tmp_path) -> Path:
    pytest.importorskip("tensorboardX")
    tell(tmp_path, 0)
    tell(tmp_path, 3)
    return tmp_path / FOLDER


def test_tensorboard_files_say_from_which_step_they_go_on(told):
    first, second = map(records, sorted(told.iterdir()))
    for events, step in ((first, 0), (second, 3)):
        assert events[0].file_version == "brain.Event:2"
        restart = events[1]
        assert restart.session_log.status == restart.session_log.START
        assert restart.step == (step + 1 if step else 0)
        scalars = [
            (e.step, v.simple_value) for e in events for v in e.summary.value if v.simple_value
        ]
        assert scalars == [(at, float(at)) for at in range(step + 1, step + 6)]
        values = [v for e in events for v in e.summary.value if v.HasField("tensor")]
        texts = {v.tag: v.tensor.string_val[0] for v in values}
        assert b'"betas"' in texts["recipe/text_summary"]
        assert texts["note/text_summary"] == b"seen"


def test_tensorboard_shows_one_curve(told):
    name = "tensorboard.backend.event_processing.event_accumulator"
    accumulator = pytest.importorskip(name).EventAccumulator(str(told))
    accumulator.Reload()
    points = [(e.step, e.value) for e in accumulator.Scalars("train/loss")]
    assert points == [(s, float(s)) for s in range(1, 9)]
