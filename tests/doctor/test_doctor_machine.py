"""Threads, limits, memory, clock, and what other runs left in staging."""

import json
import os
import resource
import shutil

import pytest

from doctor_worlds import RecordedGpus, only, world_of
from paceline.doctor import plan_machine
from paceline.doctor.checks import machine, staging, threads
from paceline.doctor.group_memory import group_memory
from paceline.doctor.world import cores_here
from paceline.durable.staging import Staging
from tiny_run import tiny_project

STORE = ("extract.store=s3://bucket/x",)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return tiny_project(tmp_path_factory.mktemp("machine"))


def machine_file(root, path, text):
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


# Threads.


def test_no_mend_is_what_stands_there_already(recipe):
    asked = ("target.devices=[0,1,2,3]", "target.threads=1")
    (found,) = only(threads.check(world_of(recipe, *asked, cores=2)), "warning")
    assert found.mend == "--set target.devices=[0,1]"


def test_all_processes_of_an_online_training_count_at_once(recipe):
    devices = ("train.target_devices=[cpu:0]", "train.drafter_devices=[cpu:1, cpu:2]")
    asked = ("train.online=true", *devices, "train.threads=2", "target.threads=2")
    (found,) = only(threads.check(world_of(recipe, *asked, cores=4)), "warning")
    assert found.what == "training: 6 threads at once, of 3 processes, on 4 cores"
    fewer = (*asked, "train.threads=1", "target.threads=1")
    assert not only(threads.check(world_of(recipe, *fewer, cores=4)), "warning")


def test_more_threads_than_cores_are_a_warning(recipe):
    [found] = threads.check(world_of(recipe, cores=4))
    assert found.what == "1 worker × 1 thread, 1 to train, on 4 cores"
    asked = ("target.workers=8", "target.threads=2", "train.threads=6")
    found = only(threads.check(world_of(recipe, *asked, cores=4)), "warning")
    assert [f.mend for f in found] == [
        "--set target.threads=1 --set target.workers=4",
        "--set train.threads=4",
    ]
    found = only(
        threads.check(world_of(recipe, "target.devices=[0,1]", "target.threads=4", cores=4)),
        "warning",
    )
    assert [f.what for f in found] == ["2 workers × 4 threads (target) on 4 cores"]


def test_openmp_settings_that_take_the_cores_are_warnings(recipe):
    environ = {"OMP_WAIT_POLICY": "ACTIVE", "OMP_NUM_THREADS": "64"}
    found = only(threads.check(world_of(recipe, cores=4, environ=environ)), "warning")
    assert [f.what for f in found] == [
        "OMP_WAIT_POLICY is active", "OMP_NUM_THREADS is 64, on 4 cores",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "slow"),
    [("flags\t: fpu avx avx2", True), ("flags\t: fpu avx512f", False), ("x: y", False)],
)
def test_bfloat16_on_a_cpu_without_avx512_is_a_warning(recipe, tmp_path, flags, slow):
    machine_file(tmp_path, "proc/cpuinfo", f"processor\t: 0\n{flags}\n")
    asked = ("target.dtype=bfloat16", "train.compute=bfloat16")
    found = only(threads.check(world_of(recipe, *asked, root=tmp_path, cores=4)), "warning")
    assert [f.mend for f in found] == (
        ["--set target.dtype=float32", "--set train.compute=float32"] if slow else []
    )
    on_gpu = ("target.dtype=bfloat16", "target.devices=[0]")
    assert not only(threads.check(world_of(recipe, *on_gpu, root=tmp_path, cores=4)), "warning")


def test_a_container_has_the_cores_that_it_is_given(tmp_path):
    own = len(os.sched_getaffinity(0))
    assert cores_here(tmp_path) == own
    machine_file(tmp_path, "sys/fs/cgroup/cpu.max", "100000 100000\n")
    assert cores_here(tmp_path) == 1
    machine_file(tmp_path, "sys/fs/cgroup/cpu.max", "max 100000\n")
    assert cores_here(tmp_path) == own
    machine_file(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n")
    machine_file(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
    assert cores_here(tmp_path) == own


# Limits.


def test_few_open_files_are_a_warning(recipe):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        found = list(machine.check_limits(world_of(recipe)))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    [warning] = only(found, "warning")
    assert warning.what == "at most 512 open files"
    assert warning.mend == f"ulimit -n {min(hard, 65536) if hard > 0 else 65536}"


def test_files_that_may_not_be_as_large_as_a_shard_are_an_error(recipe, monkeypatch):
    real = resource.getrlimit
    small = {resource.RLIMIT_FSIZE: (1 << 20, 1 << 20)}
    monkeypatch.setattr(resource, "getrlimit", lambda which: small.get(which) or real(which))
    assert not only(machine.check_limits(world_of(recipe)), "error")
    found = machine.check_limits(world_of(recipe, "extract.shard_bytes=67108864"))
    [error] = only(found, "error")
    assert (error.what, error.mend) == ("a file may have 1.0 MB at most", "ulimit -f unlimited")


def test_a_small_shared_memory_is_a_warning_where_it_would_be_staged_in(recipe):
    from paceline.durable.staging import SHARED_MEMORY

    world = world_of(recipe, *STORE)
    for total, warned in ((64 << 20, 1), (16 << 30, 0)):
        answer = vars(world.answers[SHARED_MEMORY]) | {"total": total, "kind": "folder"}
        answers = {**world.answers, SHARED_MEMORY: type(world.answers[SHARED_MEMORY])(**answer)}
        found = machine.check_limits(type(world)(**{**vars(world), "answers": answers}))
        assert len(only(found, "warning")) == warned


# Memory.

MEMINFO = "MemTotal:  {} kB\nMemAvailable:  {} kB\nSwapTotal: {} kB\nSwapFree: {} kB\n"


@pytest.mark.parametrize(
    ("numbers", "warnings"),
    [
        ((1000, 500, 0, 0), []),
        ((1000, 50, 0, 0), ["51.2 kB of 1.0 MB available"]),
        ((1000, 500, 1000, 500), ["512.0 kB are swapped out"]),
    ],
)
def test_memory_that_is_short_is_a_warning(recipe, tmp_path, numbers, warnings):
    machine_file(tmp_path, "proc/meminfo", MEMINFO.format(*numbers))
    found = machine.check_memory(world_of(recipe, root=tmp_path))
    assert [f.what for f in only(found, "warning")] == warnings


def test_a_container_has_the_memory_that_it_is_given(recipe, tmp_path):
    machine_file(tmp_path, "proc/meminfo", MEMINFO.format(10_000_000, 9_000_000, 0, 0))
    machine_file(tmp_path, "sys/fs/cgroup/memory.max", "1000000000\n")
    machine_file(tmp_path, "sys/fs/cgroup/memory.current", "950000000\n")
    [found] = machine.check_memory(world_of(recipe, root=tmp_path))
    assert (found.severity, found.what) == ("warning", "50.0 MB of 1.0 GB available")


@pytest.mark.parametrize("version", [1, 2])
def test_what_a_container_keeps_of_files_gives_way_and_shared_memory_does_not(
    recipe, tmp_path, version, monkeypatch
):
    machine_file(tmp_path, "proc/meminfo", MEMINFO.format(10_000_000, 9_000_000, 0, 0))
    folder, limit, used, prefix = {
        1: ("memory/memory", ".limit_in_bytes", ".usage_in_bytes", "total_"),
        2: ("memory", ".max", ".current", ""),
    }[version]
    statistics = "\n".join(
        f"{prefix}{name} {size}"
        for name, size in (("inactive_file", 600_000_000), ("active_file", 100_000_000),
                           ("shmem", 200_000_000), ("anon", 50_000_000))
    )  # fmt: skip
    machine_file(tmp_path, f"sys/fs/cgroup/{folder}{limit}", "1000000000\n")
    machine_file(tmp_path, f"sys/fs/cgroup/{folder}{used}", "950000000\n")
    machine_file(tmp_path, f"sys/fs/cgroup/{folder}.stat", f"{statistics}\n")
    [found] = machine.check_memory(world_of(recipe, root=tmp_path))
    assert (found.severity, found.what) == ("ok", "750.0 MB of 1.0 GB available")
    # The plan counts as the doctor does.
    group = group_memory(tmp_path)
    monkeypatch.setattr(plan_machine, "group_memory", lambda: group)
    host = plan_machine.read_machine(()).host
    assert (host.total, host.available) == (1_000_000_000, 750_000_000)


def test_where_the_system_does_not_tell_it_says_so(recipe, tmp_path):
    [found] = machine.check_memory(world_of(recipe, root=tmp_path))
    assert found.severity == "note"


# Clock.


def test_a_date_before_the_newest_event_is_an_error(recipe, tmp_path):
    event = {"v": 2, "t": 1.9e9, "pid": 1, "host": "x", "role": "extract", "kind": "start"}
    machine_file(tmp_path, "run/events/extract.jsonl", json.dumps(event) + "\n")
    run = tmp_path / "run"
    [error] = machine.check_clock(world_of(recipe, run=run, now=1.9e9 - 7200))
    assert error.severity == "error"
    assert error.what == "it is 2.0 h earlier than this run's newest event"
    [found] = machine.check_clock(world_of(recipe, run=run, now=1.9e9 + 5))
    assert found.severity == "ok"


def test_a_clock_that_was_never_set_is_an_error(recipe):
    [error] = machine.check_clock(world_of(recipe, now=3600.0))
    assert error.what == "the clock has not been set since the machine started"


# Staging.


@pytest.fixture
def shared(tmp_path, monkeypatch):
    """The shared memory of this machine is everybody's; a folder stands for it."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr("paceline.doctor.checks.staging.SHARED_MEMORY", folder)
    return folder


def left_by(folder, run):
    run.mkdir(exist_ok=True)
    left = Staging(folder, run)
    left.path("unit-000001.safetensors").write_bytes(b"x" * 10_000)
    return left


def test_the_leftovers_of_a_dead_run_are_named_with_the_command_that_removes_them(
    recipe, shared, tmp_path
):
    [found] = staging.check(world_of(recipe))
    assert found.severity == "ok"
    left = left_by(shared, tmp_path / "other")
    left._held.close()
    [found] = staging.check(world_of(recipe))
    assert found.severity == "warning"
    assert f"of the run {tmp_path / 'other'}, which has ended" in found.what
    assert found.mend == f"rm -r -- {left.root}"
    shutil.rmtree(tmp_path / "other")
    [found] = staging.check(world_of(recipe))
    assert "whose folder is gone" in found.what


def test_those_of_a_live_run_and_of_this_one_are_left_alone(recipe, shared, tmp_path):
    other = left_by(shared, tmp_path / "other")
    own = left_by(shared, tmp_path / "run")
    own._held.close()
    found = {
        f.what.rpartition("run ")[2]: f
        for f in staging.check(world_of(recipe, run=tmp_path / "run"))
    }
    other._held.close()
    assert all(f.severity == "note" and not f.mend for f in found.values())
    assert {text.partition(", ")[2] for text in found} == {
        "which is at work", "this one, which has ended; its next extract uploads what is whole",
    }  # fmt: skip


def test_the_real_machine_passes_every_check_of_it(recipe):
    world = world_of(recipe, gpus=RecordedGpus(trouble="none"))
    for check in (threads.check, machine.check_limits, machine.check_memory, machine.check_clock):
        assert list(check(world))
