"""Texts for the draft vocabulary: every form is read as a stream, and what is bad is named."""

import json
import tracemalloc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.durable.errors import DataError
from paceline.train import vocab_text
from paceline.train.vocab_text import read_texts
from paceline.train.vocabulary import count_texts
from tiny_models import END_OF_TEXT, tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model("llama", tmp_path_factory.mktemp("target"))


def written(tmp_path, name: str, text: str | bytes):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize("name", ["a.txt", "b.md", "c.TXT"])
def test_a_plain_text_comes_whole_and_in_pieces_that_end_with_a_line(tmp_path, name):
    text = "".join(f"line {n} äöü\r\n" for n in range(20_000))
    pieces = list(read_texts(written(tmp_path, name, "\ufeff" + text)))
    assert "".join(pieces) == text
    assert len(pieces) > 3
    assert all(piece.endswith("\n") for piece in pieces)


def test_a_text_of_one_line_is_cut(tmp_path):
    text = "word " * 100_000
    pieces = list(read_texts(written(tmp_path, "one.txt", text)))
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= 2 << 16


ROWS = [
    ({"text": "plain"}, ["plain"]),
    ({"prompt": "asked", "id": 3}, ["asked"]),
    ({"prompt": [{"role": "user", "content": "turn"}]}, ["turn"]),
    (
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        ["a", "b"],
    ),
    ({"conversations": [{"from": "human", "value": "c"}, {"value": "d"}]}, ["c", "d"]),
    ({"messages": [{"content": [{"type": "text", "text": "p"}, {"type": "image"}]}]}, ["p"]),
    ({"messages": [{"role": "assistant", "content": None, "tool_calls": []}]}, []),
    ({"text": "", "messages": []}, [""]),
]  # fmt: skip


def as_file(rows: list, form: str) -> str:
    if form == "lines":
        return "\n\n".join(json.dumps(row) for row in rows) + "\n"
    return json.dumps(rows, indent=None if form == "array" else 2)


@pytest.mark.parametrize(
    ("name", "form"),
    [("r.jsonl", "lines"), ("r.json", "lines"), ("r.json", "array"), ("r.json", "indented")],
)
def test_rows_of_every_form_give_their_texts(tmp_path, name, form):
    path = written(tmp_path, name, "\ufeff" + as_file([row for row, _ in ROWS], form))
    assert list(read_texts(path)) == [text for _, texts in ROWS for text in texts]


@settings(deadline=None, max_examples=60)
@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=40)),
    form=st.sampled_from(["lines", "array", "indented"]),
    piece=st.integers(1, 30),
)
def test_where_a_piece_ends_changes_nothing(tmp_path_factory, texts, form, piece):
    path = tmp_path_factory.getbasetemp() / "pieces.json"
    path.write_text(as_file([{"text": text} for text in texts], form), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocab_text, "_PIECE", piece)
        assert list(read_texts(path)) == texts


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("r.jsonl", '{"text": "a"}\n{"text": "b"\n{"text": "c"}\n', "row 2: not JSON"),
        ("r.json", '[{"text": "a"}, {"text": ]', "row 2: not JSON"),
        ("r.json", '[{"text": "a"}, {"text": "b"}', "after row 2: the array has no end"),
        ("r.json", '[{"text": "a"}] {"text": "b"}', "something follows the array's end"),
        ("r.jsonl", '{"text": "a"}\n"b"\n', "row 2: a str, not an object"),
        ("r.jsonl", '{"text": "a"}\n{"body": "b", "id": 1}\n', "row 2: no `text`, .* body, id"),
        ("r.jsonl", '{"messages": ["a"]}\n', "row 1: a turn is a str"),
        ("r.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', r"r\.jsonl, row 2: not UTF-8"),
        ("r.jsonl", '{"text": "a"}\n{"text": "\\ud800"}\n', r"r\.jsonl, row 2: not UTF-8"),
        ("t.txt", b"fine\nb\xffd\n", r"t\.txt, line 2: not UTF-8"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, name, content, expected):
    with pytest.raises(DataError, match=expected):
        list(read_texts(written(tmp_path, name, content)))


def test_deeply_nested_rows_are_refused_not_a_crash(tmp_path):
    with pytest.raises(DataError, match="row 1: not JSON"):
        list(read_texts(written(tmp_path, "r.jsonl", '{"text": ' + "[" * 200_000)))


def test_a_row_without_an_end_does_not_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(vocab_text, "_LONGEST_ROW", 1 << 16)
    path = written(tmp_path, "r.jsonl", '{"text": "' + "x" * (4 << 20))
    tracemalloc.start()
    with pytest.raises(DataError, match="row 1: not JSON"):
        list(read_texts(path))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 << 20


@pytest.mark.parametrize("name", ["t.txt", "r.jsonl", "r.json"])
def test_memory_is_that_of_a_piece_not_of_the_file(tmp_path, name):
    rows = [{"text": f"row {n} " * 20} for n in range(30_000)]
    text = as_file(rows, "array" if name == "r.json" else "lines")
    path = written(tmp_path, name, text)
    assert path.stat().st_size > 4 << 20
    tracemalloc.start()
    total = sum(len(text) for text in read_texts(path))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert total > 3 << 20
    assert peak < 1 << 20


def test_every_token_of_the_texts_is_counted(tmp_path, folder):
    paths = [
        written(tmp_path, "t.txt", "abca<|endoftext|>"),
        written(tmp_path, "r.jsonl", '{"text": "aé"}\n{"prompt": "z"}\n'),
    ]
    counts = count_texts(paths, folder, 320)
    wanted = torch.zeros(320, dtype=torch.int64)
    for byte in b"abca" + "aé".encode() + b"z":
        wanted[byte] += 1
    wanted[END_OF_TEXT] = 1
    assert torch.equal(counts, wanted)
    assert counts.shape == (320,)
