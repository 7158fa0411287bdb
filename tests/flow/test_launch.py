import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

import flow_workers
from paceline.durable.errors import DataError, StorageRefused, WorkerFailed
from paceline.flow.launch import map_items


def _ignore(_: object, __: object) -> None:
    return


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def _workers() -> list[psutil.Process]:
    return [c for c in psutil.Process().children() if "paceline-worker" in _command(c)]


def _command(process: psutil.Process) -> str:
    """Empty of one that has ended: what an earlier test left may do so at any moment."""
    try:
        return " ".join(process.cmdline())
    except (psutil.ZombieProcess, psutil.NoSuchProcess):
        return ""


def _wait_until(condition, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def test_every_item_once_over_processes_with_their_own_threads():
    before = dict(os.environ)
    got: dict[int, dict] = {}
    map_items(flow_workers.facts, None, range(9), workers=2, threads=1, on_result=got.__setitem__)
    assert sorted(got) == list(range(9))
    assert all(f["threads"] == 1 for f in got.values())
    assert {(f["wait"], f["omp"]) for f in got.values()} == {("PASSIVE", "1")}
    assert os.getpid() not in {f["pid"] for f in got.values()}
    assert dict(os.environ) == before
    assert not _workers()


def test_one_worker_runs_here_and_puts_the_threads_back():
    before = torch.get_num_threads()
    seen = []

    def setup(payload: int):
        assert torch.get_num_threads() == before + 1
        return lambda item: (item + payload, os.getpid())

    map_items(
        setup,
        10,
        [1, 2, 3],
        workers=1,
        threads=before + 1,
        on_result=lambda item, result: seen.append((item, result)),
    )
    assert seen == [(i, (i + 10, os.getpid())) for i in (1, 2, 3)]
    assert torch.get_num_threads() == before


def test_items_are_handed_out_in_order_to_whoever_is_free(tmp_path: Path):
    results: list[int] = []
    map_items(
        flow_workers.logged,
        tmp_path,
        range(12),
        workers=2,
        threads=1,
        on_result=lambda item, _: results.append(item),
    )
    started = [int(p.name.split("-")[1]) for p in sorted(tmp_path.iterdir())]
    # Two workers start at about the same time, so neighbours may swap, never more.
    assert all(abs(place - item) <= 1 for place, item in enumerate(started))
    assert sorted(results) == list(range(12))


def test_no_items_start_nothing():
    map_items(flow_workers.troubled, "setup", [], workers=2, threads=1, on_result=_ignore)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("raise", ["item 3", "ValueError: item 3 is bad", "in handle"]),
        ("kill", ["item 3", "SIGKILL", "memory"]),
        ("exit", ["item 3", "exit code 17"]),
        ("unpicklable", ["item 3", "pickling the result"]),
        ("setup", ["setting up", "ValueError: no such model"]),
    ],
)
def test_a_failing_worker_is_named_and_the_others_are_ended(how: str, expected: list[str]):
    finished: list[int] = []
    last = time.monotonic()

    def on_result(item: int, _: object) -> None:
        nonlocal last
        finished.append(item)
        last = time.monotonic()

    with pytest.raises(WorkerFailed) as caught:
        map_items(flow_workers.troubled, how, range(9), workers=2, threads=1, on_result=on_result)
    ended_after = time.monotonic() - last
    for part in expected:
        assert part in str(caught.value)
    assert not _workers()
    if how != "setup":
        assert set(finished) <= {0, 1, 2}
        assert ended_after < 1.0


def test_errors_of_our_own_keep_their_type_and_exit_code():
    for workers in (1, 2):
        with pytest.raises(DataError, match="line 3") as caught:
            map_items(
                flow_workers.troubled,
                "own",
                [0, 1, 3],
                workers=workers,
                threads=1,
                on_result=_ignore,
            )
        assert "item 2 (3)" in caught.value.__notes__[0]


def test_inline_failures_name_the_item():
    with pytest.raises(WorkerFailed, match=r"item 1 \(3\) failed: ValueError: item 3 is bad"):
        map_items(flow_workers.troubled, "raise", [0, 3], workers=1, threads=1, on_result=_ignore)


def test_an_item_that_cannot_be_sent_is_named():
    with pytest.raises(WorkerFailed, match=r"item 1 .* cannot be sent"):
        map_items(
            flow_workers.squares,
            0,
            [1, lambda: None, 2],
            workers=2,
            threads=1,
            on_result=_ignore,
        )
    assert not _workers()


def test_an_error_of_the_receiver_ends_the_workers():
    def on_result(item: int, _: object) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        map_items(flow_workers.troubled, "", range(9), workers=2, threads=1, on_result=on_result)
    assert not _workers()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's death signal is Linux's")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_workers_do_not_outlive_their_parent(tmp_path: Path, number: signal.Signals):
    parent = subprocess.Popen(
        [sys.executable, flow_workers.__file__, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stderr=subprocess.DEVNULL,
    )
    try:
        assert _wait_until(lambda: len(list(tmp_path.iterdir())) == 2, 60)
        pids = [int(p.name.split("-")[1]) for p in tmp_path.iterdir()]
        assert all(_alive(pid) for pid in pids)
        parent.send_signal(number)
        if number == signal.SIGINT:  # the first lets the items in work be finished
            time.sleep(0.7)
            assert all(_alive(pid) for pid in pids)
            parent.send_signal(number)
        assert _wait_until(lambda: not any(_alive(pid) for pid in pids), 2.0)
        assert parent.wait(5) != 0
    finally:
        parent.kill()
        parent.wait()


@pytest.mark.parametrize("workers", [1, 2])
def test_what_a_workers_disk_refuses_is_said_in_words_not_in_a_traceback(workers):
    items = [3] if workers == 1 else range(9)
    with pytest.raises(StorageRefused, match=r"^shard: No space left on device\. Make room") as it:
        map_items(
            flow_workers.troubled, "full", items, workers=workers, threads=1, on_result=_ignore
        )
    assert "Traceback" not in str(it.value)
    assert not _workers()


@pytest.mark.parametrize("moment", ["setup", "work"])
def test_a_signal_to_the_group_lets_workers_finish_their_items_and_no_more(tmp_path, moment):
    """`timeout`, a closed terminal and job schedulers signal every process of the group."""
    parent = subprocess.Popen(
        [sys.executable, flow_workers.__file__, str(tmp_path), "draining"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        wanted = 1 if moment == "setup" else 2
        marks = "spawned" if moment == "setup" else "began-*"
        assert _wait_until(lambda: len(list(tmp_path.glob(marks))) == wanted, 60)
        os.killpg(parent.pid, signal.SIGTERM)
        time.sleep(0.05)
        os.killpg(parent.pid, signal.SIGTERM)  # at once: the same request
        (tmp_path / "go").touch()
        out, err = parent.communicate(timeout=30)
    finally:
        parent.kill()
        parent.wait()
    if moment == "setup":
        assert out == "Interrupted SIGTERM: stopped after 0 of the 4 items that were left.\n"
    else:
        assert sorted(out.splitlines()) == [
            "Interrupted SIGTERM: stopped after 2 of the 4 items that were left.",
            "result 0",
            "result 1",
        ]
    assert "Traceback" not in err
