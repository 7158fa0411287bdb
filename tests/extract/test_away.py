"""A store that does not answer, or says that it is busy, outside of the uploads."""

import os
import shutil
import signal
import time

import pytest

from extract_runs import make_run
from extract_trials import events_of, manifest_bytes
from fault_proxy import fault_proxy, first, slow_down
from paceline.durable import patience
from paceline.durable.errors import StoreFailed
from paceline.extract import stage
from run_server import wait_until
from small_disks import small_disk

PHASES = {
    "listing": lambda r: r.method == "GET" and "list-type" in r.query,
    "word": lambda r: r.method == "PUT" and r.key.endswith("run.json"),
    "manifest": lambda r: r.method == "PUT" and r.key.endswith("manifest.json"),
}


def through(proxy, s3, bucket, **more):
    options = {**s3.options, "endpoint": proxy.endpoint}
    return {**bucket, "store_options": options, **more}


@pytest.mark.parametrize("phase", PHASES)
def test_a_signal_ends_it_within_seconds_though_the_store_hangs(
    tmp_path, s3, bucket, server, prepared, phase
):
    server.log = tmp_path / "log"
    with fault_proxy(s3.port) as proxy:
        hanging = []

        def rule(request, forward):
            if PHASES[phase](request):
                hanging.append(request)
                time.sleep(90)
            return forward(request)

        proxy.rule = rule
        run_dir, command = prepared.copy(tmp_path / "run", **through(proxy, s3, bucket))
        pid = server.start(*command)
        wait_until(lambda: hanging, pid, "it asks the store")
        time.sleep(0.3)
        began = time.monotonic()
        os.kill(pid, signal.SIGTERM)
        assert server.wait(pid) == 130, server.log.read_text()
        assert time.monotonic() - began < 10
        proxy.rule = lambda request, forward: forward(request)
        assert server.run(*command) == 0, server.log.read_text()
    assert manifest_bytes(run_dir)


@pytest.mark.parametrize("phase", PHASES)
def test_a_store_that_is_busy_for_a_while_is_waited_for_and_told(
    tmp_path, target, samples, s3, bucket, phase, monkeypatch
):
    monkeypatch.setattr(patience, "_FIRST_PAUSE", 0.05)
    with fault_proxy(s3.port) as proxy:
        # The client itself asks six times before it says so.
        proxy.rule = first(7, PHASES[phase], slow_down)
        recipe, run_dir = make_run(tmp_path / "run", target, samples, **through(proxy, s3, bucket))
        report = stage.run(recipe, run_dir)
    assert "manifest" in report.numbers
    (wait,) = events_of(run_dir, "waiting")
    assert wait["wait"] == "store"
    assert "SlowDown" in wait["reason"]
    assert len(events_of(run_dir, "going_on")) == 1


def test_patience_with_the_store_ends_after_space_wait(tmp_path, target, samples, s3, bucket):
    with fault_proxy(s3.port, rule=slow_down) as proxy:
        options = through(proxy, s3, bucket, space_wait=1.0)
        recipe, run_dir = make_run(tmp_path / "run", target, samples, **options)
        with pytest.raises(StoreFailed, match="SlowDown"):
            stage.run(recipe, run_dir)


def test_a_shared_folder_that_is_full_at_the_start_is_waited_for(
    tmp_path, target, samples, monkeypatch
):
    monkeypatch.setattr(patience, "_FIRST_PAUSE", 0.05)
    with small_disk(tmp_path / "small", 8 << 20) as disk:
        filler = disk / "filler"
        filler.write_bytes(bytes(shutil.disk_usage(disk).free))
        recipe, run_dir = make_run(tmp_path / "run", target, samples, store=str(disk / "store"))
        waits = []
        emit = patience.Patience._enter

        def entering(self, kind, reason):
            emit(self, kind, reason)
            waits.append(kind)
            filler.unlink(missing_ok=True)

        monkeypatch.setattr(patience.Patience, "_enter", entering)
        assert "manifest" in stage.run(recipe, run_dir).numbers
        assert waits == ["space"]


def test_what_is_complete_is_taken_over_from_a_store_that_nobody_may_write_to(
    tmp_path, target, samples, s3, bucket
):
    recipe, first_run = make_run(tmp_path / "one", target, samples, **bucket)
    stage.run(recipe, first_run)
    with fault_proxy(s3.port) as proxy:
        options = through(proxy, s3, bucket)
        recipe, second = make_run(tmp_path / "two", target, samples, **options)
        report = stage.run(recipe, second)
        assert report.numbers["units_of_earlier_runs"] == report.numbers["units"]
        assert [r.key for r in proxy.seen if r.method in ("PUT", "POST", "DELETE")] == []
    assert manifest_bytes(second) == manifest_bytes(first_run)
