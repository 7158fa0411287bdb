import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from extract_runs import make_sample
from extract_units import FINGERPRINT, make_units
from paceline.durable.errors import DataError, TargetError
from paceline.durable.fs import REAL_FS
from paceline.durable.iowatch import WatchedFs
from paceline.extract.job import UnitTimes
from paceline.extract.making import UnitMaker
from paceline.extract.worker import open_worker
from paceline.features.shard import Shard
from paceline.recipe.schema import TargetRecipe
from paceline.target.load import Target, load_target
from paceline.types.sample import batch_of
from tiny_models import tiny_model


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("target"))


def make(units, path, index=0):
    return open_worker(units.job, units.context())(units.task(index), path)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("chunk_tokens", [None, 16])
def test_a_shard_holds_what_the_target_gives(dtype, chunk_tokens, target, tmp_path):
    """A single token, equal lengths, and samples that end inside a piece and at its end."""
    units = make_units(
        tmp_path, target, [2, 40, 16, 17, 16, 33, 5, 4], dtype=dtype, chunk_tokens=chunk_tokens
    )
    path = tmp_path / "made" / "unit"
    made = make(units, path)
    shard = Shard(path)
    assert shard.verify() == made.stat
    assert shard.fingerprint == FINGERPRINT
    order = units.units[0].samples
    assert shard.sample_ids == tuple(units.samples[s].sample_id for s in order)
    model = load_target(TargetRecipe(path=str(target)))
    for row, number in enumerate(order):
        wanted = model.capture(batch_of([units.samples[number]]), (1, 3), last=True)
        got = shard.read(row)
        assert got.tokens.input_ids.tolist() == units.samples[number].input_ids
        assert torch.equal(got.tokens.loss_mask, units.samples[number].loss_mask())
        assert got.taps.dtype == getattr(torch, dtype)
        limit = 2**-8 if dtype == "bfloat16" else 1e-5
        for ours, theirs in ((got.taps, wanted.taps), (got.last, wanted.last)):
            away = (ours.float() - theirs).norm(dim=-1) / theirs.norm(dim=-1)
            assert away.max() <= limit


@pytest.mark.parametrize("chunk_tokens", [None, 16])
def test_one_copy_from_the_device_for_each_forward_pass(chunk_tokens, target, tmp_path):
    units = make_units(tmp_path, target, [40, 30, 20, 20, 10, 9, 8, 3], chunk_tokens=chunk_tokens)
    batches = len(units.units[0].batches)
    assert batches > 3
    handle = open_worker(units.job, units.context())
    for _ in range(2):
        made = handle(units.task(0), tmp_path / "unit")
        assert made.info.copies == batches


def test_warm_up_of_each_shape_class_is_outside_of_the_rate(target, tmp_path, monkeypatch):
    """What compiles is slow once for each shape, here 0.2 s; no rate may show it."""
    units = make_units(tmp_path, target, [60, 50, 20, 20, 20, 20, 20, 20, 2, 2], batch_tokens=64)
    assert [len(batch) for batch in units.units[0].batches] == [1, 1, 3, 3, 2]
    start, seen = Target.start_capture, set()

    def slow_at_first(self, batch, plan, copies):
        shape = (len(batch), max(batch.lengths) > 32, max(batch.lengths) > 4)
        if shape not in seen:
            seen.add(shape)
            time.sleep(0.2)
        return start(self, batch, plan, copies)

    handle = open_worker(units.job, units.context())
    monkeypatch.setattr(Target, "start_capture", slow_at_first)
    first: UnitTimes = handle(units.task(0), tmp_path / "unit").info
    assert first.warmed == len(seen) == 3
    assert first.timed_tokens == 50 + 3 * 20
    assert first.warm_up_seconds >= 0.6
    assert 0 < first.seconds < 0.3
    assert units.states == ["capturing", *["warming", "capturing"] * 3]
    again: UnitTimes = handle(units.task(0), tmp_path / "unit").info
    assert again.warmed == again.warm_up_seconds == 0
    assert again.timed_tokens == sum(len(s.input_ids) for s in units.samples)
    assert units.states == ["capturing", *["warming", "capturing"] * 3]


def test_the_seconds_of_a_unit_that_only_warms_up_are_none(target, tmp_path):
    units = make_units(tmp_path, target, [30])
    times = make(units, tmp_path / "unit").info
    assert (times.timed_tokens, times.seconds, times.warmed) == (0, 0.0, 1)


def test_a_batch_is_begun_before_the_last_one_is_dealt_with(target, tmp_path, monkeypatch):
    units = make_units(tmp_path, target, [20] * 12)
    assert len(units.units[0].batches) == 4
    handle = open_worker(units.job, units.context())
    handle(units.task(0), tmp_path / "unit")
    events = []
    start = Target.start_capture

    class Noted:
        def __init__(self, inner, number):
            self._inner, self._number = inner, number

        def wait(self):
            events.append(f"wait {self._number}")
            return self._inner.wait()

    def noting(self, batch, plan, copies):
        number = sum(event.startswith("start") for event in events)
        events.append(f"start {number}")
        return Noted(start(self, batch, plan, copies), number)

    monkeypatch.setattr(Target, "start_capture", noting)
    handle(units.task(0), tmp_path / "unit")
    assert events == [
        *("start 0", "start 1", "wait 0", "start 2", "wait 1", "start 3", "wait 2", "wait 3")
    ]


@pytest.mark.parametrize("taps", [(1, 3), (0,)])
@pytest.mark.parametrize("last", [True, False])
def test_states_that_are_not_finite_name_their_sample(taps, last, target, tmp_path):
    """Token 255 has an infinite embedding; one sample in the middle of a batch holds it."""
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in target.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    weights = load_file(broken / "model.safetensors")
    weights["model.embed_tokens.weight"][255] = torch.inf
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    samples = [make_sample(n, 20) for n in range(9)]
    for sample in samples:
        sample.input_ids[:] = [token % 255 for token in sample.input_ids]
    samples[4].input_ids[7] = 255
    units = make_units(tmp_path, broken, [], samples=samples, layer_ids=taps, last=last)
    handle = open_worker(units.job, units.context())
    with pytest.raises(TargetError, match=f"sample {samples[4].sample_id}: .* not finite"):
        handle(units.task(0), tmp_path / "unit")
    assert not (tmp_path / "unit").exists()


def test_another_target_than_planned_with_is_refused(target, tmp_path):
    units = make_units(tmp_path, target, [30]).with_job(identity="0" * 32)
    with pytest.raises(TargetError, match=r"planned with 0{32}\. The target was changed"):
        open_worker(units.job, units.context())


def test_every_byte_goes_through_the_worker_s_file_system(target, tmp_path):
    units = make_units(tmp_path, target, [30, 20])
    calls = []

    class Noting:
        def __getattr__(self, name):
            def call(*args, **kwargs):
                calls.append(name)
                return getattr(REAL_FS, name)(*args, **kwargs)

            return call

    context = units.context()
    context.fs = WatchedFs(Noting(), context.watch)
    made = open_worker(units.job, context)(units.task(0), tmp_path / "unit")
    assert Shard(tmp_path / "unit").verify() == made.stat
    assert {"open_new", "write", "sync", "replace", "sync_dir"} <= set(calls)


def test_a_corpus_that_does_not_answer_is_told_of(target, tmp_path):
    """A FIFO without a writer: the call to open it does not return."""
    units = make_units(tmp_path, target, [30])
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    context = units.context()
    errors = []

    def setup():
        try:
            open_worker(units.with_job(corpus=fifo).job, context)
        except (DataError, OSError) as error:
            errors.append(error)

    thread = threading.Thread(target=setup, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not (calls := context.watch.ongoing(0.2)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [(call.what, call.path) for call in calls] == [("read corpus", str(fifo))]
    with fifo.open("wb"):
        pass
    thread.join(20)
    assert not thread.is_alive()
    assert len(errors) == 1
    assert context.watch.ongoing() == []


def test_kernels_are_kept_where_the_job_says(target, tmp_path, monkeypatch):
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "elsewhere")
    units = make_units(tmp_path, target, [30], compile_cache=tmp_path / "kernels")
    open_worker(units.job, units.context())
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        assert Path(os.environ[name]).parent.parent == tmp_path / "kernels"


def test_the_supervisor_needs_no_torch_to_hand_the_setup_on():
    code = (
        "import sys, pickle; from paceline.extract.worker import open_worker; "
        "import paceline.extract.job; pickle.dumps(open_worker); "
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.gpu
def test_gpu_a_shard_is_that_of_the_cpu(target, tmp_path):
    units = make_units(tmp_path, target, [40, 30, 20, 20, 10, 9, 8, 3], dtype="float32")
    on_gpu = units.with_job(target=TargetRecipe(path=str(target), device="cuda:0"))
    make(units, tmp_path / "cpu")
    handle = UnitMaker(on_gpu.job, on_gpu.context())
    for _ in range(2):
        handle(units.task(0), tmp_path / "gpu")
        ours, theirs = Shard(tmp_path / "gpu").features, Shard(tmp_path / "cpu").features
        away = (ours.taps - theirs.taps).norm(dim=-1) / theirs.taps.norm(dim=-1)
        assert away.max() <= 1e-3
