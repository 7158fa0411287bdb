"""What of a folder is not read, and what of a file is lost, is said by name and number."""

import gzip
import json

import pytest

from fixtures_chatml import turns
from fixtures_corpus import recipe_of, write_jsonl
from paceline.corpus.lint.findings import findings
from paceline.corpus.lint.lint import lint
from paceline.corpus.lint.page import render
from paceline.corpus.lint.text import sections
from paceline.corpus.stage import run
from paceline.recipe.data_files import unread_files
from paceline.recipe.run_dir import RunDir


def rows(count, start=0):
    numbers = range(start, start + count)
    return [{"messages": turns(f"u:question {n}?|a:The answer to it is {n}.")} for n in numbers]


@pytest.fixture
def folder(tmp_path):
    """Two files of rows, and beside them a text."""
    place = tmp_path / "chats"
    (place / "more").mkdir(parents=True)
    write_jsonl(place / "a.jsonl", rows(3))
    write_jsonl(place / "more" / "b.jsonl", [*rows(2, 3), b"no json"])
    (place / "notes.txt").write_text("a question?\nanother?\n")
    return place


def finding(tmp_path, source, title):
    result = lint(recipe_of(tmp_path, source))
    found = findings(result)
    [one] = [f for f in found if title in f.title]
    return one, result, found


def test_a_text_beside_rows_is_named_as_not_read(tmp_path, folder):
    report = run(recipe_of(tmp_path, folder), RunDir(tmp_path / "run"))
    [line] = [line for line in report.lines if "not read" in line]
    assert line.startswith("warning: 1 file is not read in chats: notes.txt. A folder stands for")
    source = report.numbers["sources"]["chats"]
    assert source["unread"] == ["notes.txt"]
    assert source["files"] == {
        "a.jsonl": {"read": 3, "quarantined": 0},
        "more/b.jsonl": {"read": 3, "quarantined": 1},
    }
    assert "  more/b.jsonl: read 3, quarantined 1" in report.lines
    one, result, found = finding(tmp_path, folder, "1 file is not read in chats")
    assert one.level == "warning"
    assert "notes.txt" in one.text
    page = render(result, found).decode()
    assert "notes.txt" in page
    assert "more/b.jsonl" in page
    said = [line for _, lines in sections(result, found) for line in lines]
    assert any("notes.txt" in line for line in said)
    assert "  a.jsonl: read 3" in said


def test_what_is_about_the_data_is_a_note_and_hidden_files_are_none(tmp_path, folder):
    (folder / "notes.txt").rename(folder / "README.md")
    (folder / ".cache").write_text("x")
    (folder / "LICENSE").write_text("x")
    assert unread_files(str(folder)) == ("LICENSE", "README.md")
    assert finding(tmp_path, folder, "2 files are not read in chats")[0].level == "note"


def test_texts_that_are_read_are_not_named(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("a question?\n")
    assert unread_files(str(tmp_path / "texts")) == ()
    assert unread_files(str(tmp_path / "texts" / "a.txt")) == ()


def test_a_torn_file_is_a_warning_that_says_nobody_knows_how_much_is_lost(tmp_path):
    whole = gzip.compress(b"".join(json.dumps(row).encode() + b"\n" for row in rows(3000)))
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes(whole[: len(whole) // 2])
    report = run(recipe_of(tmp_path, path), RunDir(tmp_path / "run"))
    source = report.numbers["sources"]["cut"]
    [(name, before)] = source["torn"].items()
    assert name == "cut.jsonl.gz"
    assert 100 < before == source["read"] - 1 < 2900
    [line] = [line for line in report.lines if "breaks off" in line]
    assert line.startswith(f"warning: cut.jsonl.gz of cut breaks off after {before} rows: ")
    one, _, found = finding(tmp_path, path, "1 file of cut is broken off in the middle")
    assert one.level == "warning"
    assert f"cut.jsonl.gz after {before:,} rows" in one.text
    assert not [f for f in found if "would be left out" in f.title], "0.1 % would play it down"
