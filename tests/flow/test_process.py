import os
import select
import socket
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.durable.errors import UserError
from paceline.flow.devices import device_environment
from paceline.flow.patience import Patience
from paceline.flow.process import Mailbox, end_children, receive_bytes, send_bytes, start_child
from paceline.flow.waker import Waker


def echo(end: socket.socket, names: list[str]) -> None:
    """Run in the child: send back what some variables are."""
    for name in names:
        send_bytes(end, os.environ.get(name, "unset").encode())
    receive_bytes(end)


def test_the_environment_is_the_childs_alone_and_the_parents_never_changes():
    before = dict(os.environ)
    is_over = threading.Event()
    seen: set[str] = set()

    def look() -> None:
        while not is_over.is_set():
            seen.add(os.environ.get("CUDA_VISIBLE_DEVICES", "unset"))
            time.sleep(0.0005)

    thread = threading.Thread(target=look)
    thread.start()
    names = ["CUDA_VISIBLE_DEVICES", "PATH"]
    child = start_child(echo, (names,), name="w", environment={"CUDA_VISIBLE_DEVICES": "5"})
    try:
        assert [receive_bytes(child.socket) for _ in names] == [b"5", before["PATH"].encode()]
    finally:
        is_over.set()
        thread.join()
        assert end_children([child], 5.0) == []
    assert seen == {before.get("CUDA_VISIBLE_DEVICES", "unset")}
    assert dict(os.environ) == before
    assert child.how_it_ended().startswith("was killed by SIGKILL")


def test_modules_in_the_working_folder_do_not_replace_pythons_own(tmp_path: Path, monkeypatch):
    (tmp_path / "json.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    child = start_child(echo, (["PATH"],), name="w", environment={})
    try:
        assert receive_bytes(child.socket) == os.environ["PATH"].encode()
    finally:
        end_children([child], 5.0)


def test_a_child_ends_by_itself_when_the_other_end_closes():
    child = start_child(echo, ([],), name="w", environment={})
    child.socket.close()
    assert child.wait(10)
    assert child.how_it_ended() in ("ended with exit code 1", "ended with exit code 0")


@settings(max_examples=50, deadline=None)
@given(st.lists(st.binary(max_size=2000), max_size=20), st.data())
def test_messages_arrive_whole_and_in_order_however_they_are_cut(messages, data):
    ours, theirs = socket.socketpair()
    wire = b"".join(len(m).to_bytes(8, "big") + m for m in messages)
    box, got = Mailbox(ours), []
    with ours, theirs:
        while wire:
            size = data.draw(st.integers(1, len(wire)))
            theirs.sendall(wire[:size])
            wire = wire[size:]
            got += box.collect()
        assert not box.is_closed
        theirs.close()
        assert got + box.collect() == messages
        assert box.is_closed


def test_a_mailbox_waits_neither_for_a_reader_nor_for_the_rest_of_a_message():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        box = Mailbox(ours)
        big = os.urandom(4 << 20)
        started = time.monotonic()
        box.post(b"first")
        box.post(big)
        assert box.wants_to_send
        theirs.sendall((100).to_bytes(8, "big") + b"half")
        assert box.collect() == []
        assert time.monotonic() - started < 1.0
        got: list[bytes] = []
        reader = threading.Thread(
            target=lambda: got.extend(receive_bytes(theirs) for _ in range(2)), daemon=True
        )
        reader.start()
        while box.wants_to_send:
            select.select([], [box], [], 5)
            box.flush()
        reader.join(5)
        assert got == [b"first", big]


def test_a_dead_reader_takes_what_waits_with_it_and_its_last_words_are_read():
    ours, theirs = socket.socketpair()
    box = Mailbox(ours)
    send_bytes(theirs, b"last words")
    box.post(bytes(4 << 20))
    theirs.close()
    box.flush()
    assert not box.wants_to_send
    assert box.collect() == [b"last words"]
    assert box.is_closed
    ours.close()


@pytest.mark.parametrize(
    ("device", "listed", "expected"),
    [(2, None, "2"), (1, "4,5,6", "5"), (0, " GPU-ab , GPU-cd", "GPU-ab"), (1, "3,4,-1,5", "4")],
)
def test_a_device_is_counted_within_what_the_parent_sees(device, listed, expected):
    environment = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    assert device_environment(device, environment) == {"CUDA_VISIBLE_DEVICES": expected}


@pytest.mark.parametrize(("device", "listed"), [(2, "0,1"), (0, ""), (0, "-1"), (2, "3,4,-1,5")])
def test_a_device_beyond_them_is_refused(device, listed):
    with pytest.raises(UserError, match=r"target\.devices names GPU"):
        device_environment(device, {"CUDA_VISIBLE_DEVICES": listed})


def test_pauses_double_up_to_a_minute_and_begin_anew_after_a_success():
    patience = Patience(restarts=100, window=1e9, backoff=1.0)
    pauses = [patience.after_death(0.0) for _ in range(8)]
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    patience.succeeded()
    assert patience.after_death(0.0) == 1.0


def test_restarts_are_counted_within_the_window_and_a_success_does_not_renew_them():
    patience = Patience(restarts=2, window=10.0, backoff=0.0)
    assert patience.after_death(0.0) == 0.0
    patience.succeeded()
    assert patience.after_death(6.0) == 0.0
    assert patience.after_death(9.9) is None
    assert patience.after_death(10.0) == 0.0
    assert patience.after_death(11.0) is None


def test_a_waker_wakes_from_any_thread_and_never_blocks():
    waker = Waker()
    assert select.select([waker], [], [], 0)[0] == []
    threading.Thread(target=lambda: [waker() for _ in range(100_000)]).start()
    assert select.select([waker], [], [], 5)[0] == [waker]
    waker()
    time.sleep(0.05)
    while select.select([waker], [], [], 0.05)[0]:
        waker.clear()
    waker.close()
    waker()
