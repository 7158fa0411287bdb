"""Training from an object store: the same as from a folder, over copies that do not all fit."""

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from urllib.parse import urlsplit

import pytest
import torch

from fault_proxy import FaultProxy, fault_proxy, pass_on
from paceline.durable.checksum import crc64_hex
from paceline.durable.errors import Interrupted, RecipeChanged
from paceline.durable.object_store import ObjectStore
from paceline.durable.store import LocalStore, Store
from paceline.features.manifest import Manifest, UnitEntry, publish
from paceline.features.plan import unit_key
from paceline.features.reader import FeatureReader
from paceline.features.shard import write_shard
from paceline.recipe.run_dir import RunDir
from paceline.train import loop, source, stage
from paceline.train.checkpoint import read_state
from training_runs import assert_same_end, events, newest, step_events, stop_after

PER_SHARD = 4


def repacked(run_dir: RunDir, store: Store) -> Manifest:
    """The run's features in small shards, coded, in `store`; the run's own manifest names it."""
    old = FeatureReader(run_dir.features)
    units = []
    for first in range(0, len(old), PER_SHARD):
        indices = range(first, min(first + PER_SHARD, len(old)))
        path = run_dir.root / "made" / unit_key(len(units))
        stat = write_shard(
            path,
            joined([old.read(i) for i in indices]),
            fingerprint=old.manifest.fingerprint,
            codec="planes",
        )
        store.put(path.name, path, stat.crc64)
        units.append(
            UnitEntry(
                key=path.name,
                size=stat.size,
                crc64=crc64_hex(stat.crc64),
                sample_ids=tuple(old.sample_ids[i] for i in indices),
                lengths=tuple(old.lengths[i] for i in indices),
                loss_tokens=tuple(old.loss_tokens[i] for i in indices),
            )
        )
    run_dir.features.unlink()  # a link to the features that all tests share
    manifest = replace(old.manifest, units=tuple(units), codec="planes", store=store.url)
    publish(run_dir.features, manifest)
    return manifest


def joined(parts):
    first = parts[0]
    tokens = [p.tokens for p in parts]
    return replace(
        first,
        tokens=replace(
            first.tokens,
            input_ids=torch.cat([t.input_ids for t in tokens]),
            loss_mask=torch.cat([t.loss_mask for t in tokens]),
            offsets=torch.tensor([0, *(len(t.input_ids) for t in tokens)]).cumsum(0),
            sample_ids=tuple(i for t in tokens for i in t.sample_ids),
        ),
        taps=torch.cat([p.taps for p in parts]),
        last=None if first.last is None else torch.cat([p.last for p in parts]),
    )


def test_a_training_over_an_object_store_is_the_one_over_a_folder(
    fresh_run, tmp_path, s3, monkeypatch, caplog
):
    recipe, far = fresh_run(shard_window=2)
    same, near = fresh_run(shard_window=2)
    with s3.credentials():
        store = ObjectStore(s3.url(tmp_path.name), s3.options)
        manifest = repacked(far, store)
        assert repacked(near, LocalStore(tmp_path / "folder")).digest == manifest.digest
        largest = max(unit.size for unit in manifest.units)
        recipe = replace(
            recipe,
            extract=replace(recipe.extract, store_options=s3.options),
            train=replace(recipe.train, cache_bytes=3 * largest),
        )
        undo = stop_after(monkeypatch, 5)
        with pytest.raises(Interrupted):
            stage.run(recipe, far)
        undo()
        for window in (None, 3):
            other = replace(recipe, train=replace(recipe.train, shard_window=window))
            with pytest.raises(RecipeChanged, match=r"train\.shard_window"):
                stage.run(other, far)
        stage.run(recipe, far)
    copies = [p for p in far.shard_cache.rglob("*") if p.suffix == ".safetensors"]
    assert 0 < sum(p.stat().st_size for p in copies) <= 3 * largest
    assert "shard_window" not in caplog.text, "the copies hold two shards"
    stage.run(same, near)
    assert not near.shard_cache.exists()
    assert_same_end(far, near)


def test_a_store_that_its_copies_cannot_hold_is_told_at_the_start(fresh_run, tmp_path, s3, caplog):
    recipe, run_dir = fresh_run(epochs=0.2, evaluations=1)
    with s3.credentials():
        manifest = repacked(run_dir, ObjectStore(s3.url(tmp_path.name), s3.options))
        largest = max(unit.size for unit in manifest.units)
        recipe = replace(
            recipe,
            extract=replace(recipe.extract, store_options=s3.options),
            train=replace(recipe.train, cache_bytes=2 * largest),
        )
        report = stage.run(recipe, run_dir)
    assert "Set train.shard_window to 1 or less" in caplog.text
    assert any("train.shard_window" in remark for remark in report.numbers["remarks"])


TRAINING = """
import pickle, sys
from paceline.train import stage
stage.run(*pickle.load(sys.stdin.buffer))
"""


class Silence:
    """A rule of the proxy: from request `after` on, no answer until `end` is called."""

    def __init__(self, after: int = 0) -> None:
        self.asked = threading.Event()
        self._left = after
        self._over = threading.Event()
        self.end = self._over.set

    def __call__(self, request, forward):
        self._left -= 1
        if self._left < 0:
            self.asked.set()
            self._over.wait()
        return forward(request)


@contextmanager
def silent(proxy: FaultProxy, after: int = 0):
    proxy.rule = silence = Silence(after)
    try:
        yield silence
    finally:
        proxy.rule = pass_on
        silence.end()


def test_a_signal_ends_a_training_whose_store_does_not_answer(fresh_run, tmp_path, s3, monkeypatch):
    """In a step and in an evaluation: a checkpoint within seconds, and nothing of it is lost."""
    recipe, far = fresh_run(shard_window=2)
    same, near = fresh_run(shard_window=2)
    repacked(near, LocalStore(tmp_path / "folder"))
    port = urlsplit(s3.options["endpoint"]).port
    with s3.credentials(), fault_proxy(port) as proxy:
        repacked(far, ObjectStore(s3.url(tmp_path.name), s3.options))
        options = dict(s3.options) | {"endpoint": proxy.endpoint}
        recipe = replace(recipe, extract=replace(recipe.extract, store_options=options))
        with silent(proxy, after=5) as silence:
            train = subprocess.Popen(
                [sys.executable, "-c", TRAINING], stdin=subprocess.PIPE, stderr=subprocess.PIPE
            )
            train.stdin.write(pickle.dumps((recipe, far)))
            train.stdin.flush()
            assert silence.asked.wait(120)
            time.sleep(1.5)
            train.send_signal(signal.SIGTERM)
            sent = time.monotonic()
            _, told = train.communicate(timeout=60)
            assert time.monotonic() - sent < 20, "the store's own patience is minutes"
        done = read_state(newest(far))
        assert 0 < done.step < 13
        assert len(step_events(far)) == done.step
        assert f"SIGTERM: stopped after step {done.step}, with a checkpoint" in told.decode()

        original = loop.Trainer._evaluate

        def alone(self):
            """No copy is left, and the store has gone."""
            for copy in far.shard_cache.rglob("*.safetensors"):
                copy.unlink()
            proxy.rule = silence
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
            return original(self)

        with silent(proxy) as silence:
            proxy.rule = pass_on
            monkeypatch.setattr(loop.Trainer, "_evaluate", alone)
            monkeypatch.setattr(source, "_GRACE", 0.5)
            sent = time.monotonic()
            with pytest.raises(Interrupted, match="with a checkpoint"):
                stage.run(recipe, far)
            assert time.monotonic() - sent < 20
            monkeypatch.setattr(loop.Trainer, "_evaluate", original)
        state = read_state(newest(far))
        assert state.step > done.step
        assert state.tau == {}
        stage.run(recipe, far)
        assert state.step in {e["step"] for e in events(far, "evaluation")}, "made up for"
    stage.run(same, near)
    assert_same_end(far, near)


def test_a_signal_before_the_first_step_waits_for_no_store(fresh_run, tmp_path, s3, monkeypatch):
    monkeypatch.setattr(source, "_GRACE", 0.5)
    recipe, run_dir = fresh_run()
    port = urlsplit(s3.options["endpoint"]).port
    with s3.credentials(), fault_proxy(port) as proxy, silent(proxy) as silence:
        repacked(run_dir, ObjectStore(s3.url(tmp_path.name), s3.options))
        options = dict(s3.options) | {"endpoint": proxy.endpoint}
        recipe = replace(recipe, extract=replace(recipe.extract, store_options=options))

        def kill():
            silence.asked.wait(60)
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=kill, daemon=True).start()
        with pytest.raises(Interrupted, match="stopped before the first step"):
            stage.run(recipe, run_dir)
        assert not list(run_dir.checkpoints.glob("step_*"))
