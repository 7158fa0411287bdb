import os
import socket

import pytest

from paceline.durable.journal import Journal
from paceline.durable.session import end_record, oom_kills, session_record


def test_a_session_says_who_and_where_and_is_numbered(tmp_path):
    with Journal(tmp_path / "j") as journal:
        journal.append(session_record(journal.records, {"paceline": "1"}))
        journal.append({"kind": "verified"})
        journal.append(end_record("failed", "no"))
        journal.append(session_record(journal.records, {}))
    with Journal(tmp_path / "j") as journal:
        first, _, end, second = journal.records
    assert (first["session"], second["session"]) == (1, 2)
    assert (first["pid"], first["host"]) == (os.getpid(), socket.gethostname())
    assert first["software"] == {"paceline": "1"}
    assert (end["how"], end["error"]) == ("failed", "no")
    assert first["oom_kills"] is None or first["oom_kills"] >= 0


@pytest.mark.parametrize(
    ("own", "files", "count"),
    [
        ("0::/user.slice/s.scope\n", {"user.slice/s.scope/memory.events": 3}, 3),
        (
            "0::/user.slice/s.scope\n",
            {"user.slice/s.scope/memory.events": 0, "user.slice/memory.events": 7},
            7,
        ),
        ("0::/\n", {"memory.events": 2}, 2),
        ("0::/../../x\n", {"memory.events": 2}, 2),
        ("4:cpu:/\n3:memory:/a\n0::/\n", {"memory/a/memory.oom_control": 5, "memory.events": 1}, 5),
        ("3:cpu,memory:/hidden\n", {"memory/memory.oom_control": 6}, 6),
        ("0::/\n", {}, None),
        ("", {}, None),
    ],
)
def test_deaths_for_want_of_memory_are_read_from_both_kinds_of_control_groups(
    tmp_path, own, files, count
):
    (tmp_path / "own").write_text(own)
    for name, kills in files.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"low 0\nunder_oom 0\noom 9\noom_kill {kills}\noom_group_kill 1\n")
    assert oom_kills(tmp_path / "own", tmp_path / "root") == count
    assert oom_kills(tmp_path / "absent", tmp_path / "root") is None
