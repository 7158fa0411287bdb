"""Every form that data come in gives the same rows, and what is damaged gives what it has."""

import gzip
import json
import os
import tracemalloc
from contextlib import suppress
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import ipc

from fixtures_chatml import turns
from fixtures_corpus import quarantine_of, recipe_of, samples_of
from paceline.corpus import stage
from paceline.durable.errors import DataError, RecipeError
from paceline.recipe.check import check_paths
from paceline.recipe.data_files import data_digest, data_files, data_name
from paceline.recipe.load import resolve_paths
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import SourceRecipe
from paceline.rows.conversation import conversation_of
from paceline.rows.formats import read_rows

ROWS = [{"messages": turns(f"u:question {i} ö|a:answer\n\n{i} 中")} for i in range(7)]
MADE = [conversation_of(row) for row in ROWS]


def as_jsonl(rows) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def as_parquet(path: Path, rows=ROWS) -> None:
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=3)


def as_stream(path: Path, rows=ROWS, batch: int = 2) -> None:
    table = pa.Table.from_pylist(rows)
    with path.open("wb") as file, ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=batch)


def as_arrow_file(path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    with path.open("wb") as file, ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


FORMS = {
    "rows.jsonl": lambda p: p.write_bytes(as_jsonl(ROWS)),
    "rows.ndjson": lambda p: p.write_bytes(as_jsonl(ROWS).replace(b"\n", b"\r\n")),
    "bom.jsonl": lambda p: p.write_bytes(b"\xef\xbb\xbf" + as_jsonl(ROWS)),
    "rows.json": lambda p: p.write_text(json.dumps(ROWS)),
    "bom.json": lambda p: p.write_text(
        "\ufeff\n " + json.dumps(ROWS, ensure_ascii=False, indent=2)
    ),
    "lines.json": lambda p: p.write_bytes(as_jsonl(ROWS)),
    "pretty.json": lambda p: p.write_text("\n".join(json.dumps(r, indent=1) for r in ROWS)),
    "data.json": lambda p: p.write_text(json.dumps({"version": 2, "data": ROWS})),
    "indented.json": lambda p: p.write_text(json.dumps({"data": ROWS, "n": [1]}, indent=2)),
    "rows.jsonl.gz": lambda p: p.write_bytes(gzip.compress(as_jsonl(ROWS))),
    "two.jsonl.gz": lambda p: p.write_bytes(
        gzip.compress(as_jsonl(ROWS[:3])) + gzip.compress(as_jsonl(ROWS[3:]))
    ),
    "rows.json.gz": lambda p: p.write_bytes(gzip.compress(json.dumps(ROWS).encode())),
    "padded.jsonl.gz": lambda p: p.write_bytes(gzip.compress(as_jsonl(ROWS)) + bytes(9000)),
    "data-of-lines.json": lambda p: p.write_text(
        '{"version": "1", "data": [\n' + ",\n".join(map(json.dumps, ROWS)) + "\n]}\n"
    ),
    "indented-behind-a-key.json": lambda p: p.write_text(
        "\n".join(json.dumps({"id": 1, **row}, indent=1).replace("{\n", "{", 1) for row in ROWS)
    ),
    "rows.jsonl.zst": lambda p: p.write_bytes(zstandard.compress(as_jsonl(ROWS))),
    "rows.parquet": as_parquet,
    "stream.arrow": as_stream,
    "file.arrow": as_arrow_file,
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_gives_the_same_rows(tmp_path, name):
    FORMS[name](tmp_path / name)
    rows = list(read_rows(tmp_path / name))
    assert [conversation_of(row.value or {}) for row in rows] == MADE
    assert [row.line for row in rows] == list(range(1, 8))
    assert {row.file for row in rows} == {tmp_path / name}
    # The bytes are what a process that tokenises gets, and what quarantine quotes.
    assert [conversation_of(msgspec.json.decode(row.raw)) for row in rows] == MADE


def test_a_folder_gives_the_rows_of_all_its_files_in_the_order_of_their_names(tmp_path):
    folder = tmp_path / "data"
    (folder / "b").mkdir(parents=True)
    as_parquet(folder / "b" / "x.parquet")
    (folder / "a.jsonl").write_bytes(as_jsonl(ROWS[:2]))
    (folder / "README.md").write_text("About these data\n")
    (folder / ".hidden.jsonl").write_bytes(as_jsonl(ROWS))
    (folder / "dataset_infos.json").write_text("{}")
    (folder / "load.py").write_text("")
    rows = list(read_rows(folder))
    assert [(row.file.name, row.line) for row in rows] == [
        ("a.jsonl", 1),
        ("a.jsonl", 2),
        *(("x.parquet", i) for i in range(1, 8)),
    ]
    assert [row.line for row in read_rows(folder, limit=4)] == [1, 2, 1, 2]
    moved = folder.rename(tmp_path / "elsewhere")
    digest = data_digest(str(moved))
    assert digest == data_digest(str(moved.rename(folder)))
    (folder / "a.jsonl").rename(folder / "c.jsonl")
    assert data_digest(str(folder)) != digest
    assert data_name(str(folder)) == "data"


@pytest.mark.parametrize("name", ["more.csv", "sub/more.jsonl.bz2", "more.parquet.gz", "x.tar.gz"])
def test_data_in_a_folder_that_cannot_be_read_are_not_passed_over(tmp_path, name):
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.jsonl").write_bytes(as_jsonl(ROWS))
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(DataError, match=rf"{name} in it is of a form that is not read"):
        data_files(str(tmp_path))
    (tmp_path / name).unlink()
    assert data_files(str(tmp_path)) == (tmp_path / "a.jsonl",)


def test_links_in_a_folder_are_followed_and_none_of_them_in_a_circle(tmp_path):
    folder, other = tmp_path / "data", tmp_path / "other"
    (folder / "sub").mkdir(parents=True)
    other.mkdir()
    for place in (folder / "a.jsonl", folder / "sub" / "b.jsonl", other / "c.jsonl"):
        place.write_bytes(as_jsonl(ROWS))
    (folder / "linked").symlink_to(other)
    (folder / "d.jsonl").symlink_to(other / "c.jsonl")
    (folder / "sub" / "up").symlink_to(folder)
    (other / "back").symlink_to(folder)
    names = [file.relative_to(folder).as_posix() for file in data_files(str(folder))]
    assert names == ["a.jsonl", "d.jsonl", "linked/c.jsonl", "sub/b.jsonl"]


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda path: path.symlink_to("nowhere.jsonl"), "a link that leads nowhere"),
        (lambda path: path.symlink_to(path.name), "a link that leads nowhere"),
        (os.mkfifo, "no file of a disk"),
    ],
)
def test_what_has_the_name_of_data_in_a_folder_and_is_none_is_not_passed_over(tmp_path, make, what):
    (tmp_path / "a.jsonl").write_bytes(as_jsonl(ROWS))
    make(tmp_path / "x.jsonl")
    with pytest.raises(DataError, match=rf"x\.jsonl: {what}"):
        data_files(str(tmp_path))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read whatever it likes")
def test_a_folder_that_cannot_be_listed_is_not_passed_over(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(as_jsonl(ROWS))
    (tmp_path / "closed").mkdir(0o000)
    with pytest.raises(DataError, match=r"closed: cannot be listed \(Permission denied\)"):
        data_files(str(tmp_path))


def test_a_folder_of_texts_alone_is_read_as_text(tmp_path):
    (tmp_path / "b.txt").write_text("one\n\n  two \r\nthree")
    (tmp_path / "a.md").write_bytes(b"# title\n\xff\n")
    rows = list(read_rows(tmp_path))
    assert [row.value for row in rows if row.value] == [
        {"text": text} for text in ("# title", "one", "two", "three")
    ]
    assert [row.fault.reason for row in rows if row.fault] == ["bad_utf8"]
    assert sum(row.is_blank for row in rows) == 1


def test_what_datasets_saves_is_read_in_its_own_order(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "one", num_shards=3)
    assert [conversation_of(row.value or {}) for row in read_rows(tmp_path / "one")] == MADE
    both = datasets.DatasetDict(
        {
            name: datasets.Dataset.from_list(rows)
            for name, rows in (("test", ROWS[:1]), ("train", ROWS))
        }
    )
    both.save_to_disk(tmp_path / "both")
    assert len(list(read_rows(tmp_path / "both"))) == 7
    assert len(list(read_rows(tmp_path / "both" / "test"))) == 1
    (tmp_path / "one" / "data-00001-of-00003.arrow").unlink()
    with pytest.raises(DataError, match=r"data-00001-of-00003\.arrow: is missing"):
        list(read_rows(tmp_path / "one"))


CARD = """---
configs:
- config_name: chats
  data_files:
  - split: train
    path: data/train-*
  - split: bench
    path: data/bench.parquet
- config_name: other
  data_files: other.jsonl
---
"""


@pytest.fixture
def hub(tmp_path):
    folder = tmp_path / "hub"
    (folder / "data").mkdir(parents=True)
    (folder / "README.md").write_text(CARD)
    as_parquet(folder / "data" / "train-00000-of-00002.parquet", ROWS[:4])
    as_parquet(folder / "data" / "train-00001-of-00002.parquet", ROWS[4:])
    as_parquet(folder / "data" / "bench.parquet", ROWS[:1])
    (folder / "other.jsonl").write_bytes(as_jsonl(ROWS[:2]))
    return folder


def test_a_data_set_in_the_layout_of_the_hub(hub, tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    rows = list(read_rows(f"hf:{hub}?config=chats"))
    assert [conversation_of(row.value or {}) for row in rows] == MADE
    assert len(list(read_rows(f"hf:{hub}?config=chats&split=bench"))) == 1
    assert len(list(read_rows(f"hf:{hub}?config=other"))) == 2
    with pytest.raises(DataError, match=r"no split `nix`, but train, bench\. Choose"):
        data_files(f"hf:{hub}?config=chats&split=nix")
    with pytest.raises(DataError, match=r"Available: \['chats', 'other'\]"):
        data_files(f"hf:{hub}?config=nix")
    with pytest.raises(DataError, match=r"unknown key `spilt`\. Keys are config, split, revision"):
        data_files(f"hf:{hub}?spilt=train")
    with pytest.raises(DataError, match="no data set is named"):
        data_files("hf:")
    assert data_name("hf:owner/name?split=x") == "name"
    monkeypatch.chdir(tmp_path)
    recipe = resolve_paths(recipe_of(tmp_path, Path("x")))
    [source] = recipe.corpus.sources
    assert source.path == str(tmp_path / "x")
    for path in ("hf:owner/name?split=x", f"hf:{hub}?config=other"):
        assert resolve_paths(_with_path(recipe, path)).corpus.sources[0].path == path
    assert resolve_paths(_with_path(recipe, "hf:./hub?config=other")).corpus.sources[0].path == (
        f"hf:{tmp_path}/hub?config=other"
    )


def _with_path(recipe, path):
    return recipe_of(Path(recipe.target.path).parent, SourceRecipe(path=path))


def test_prepare_takes_a_data_set_of_the_hubs_layout(hub, tmp_path):
    pytest.importorskip("datasets")
    recipe = _with_path(recipe_of(tmp_path, Path("x")), f"hf:{hub}?config=chats")
    (Path(recipe.target.path) / "config.json").write_text("{}")
    check_paths(recipe)
    report = stage.run(recipe, RunDir(tmp_path / "run"))
    assert report.numbers["accepted"] == 7
    assert {sample.source for sample in samples_of(RunDir(tmp_path / "run"))} == {"hub"}
    assert stage.run(recipe, RunDir(tmp_path / "run")).skipped
    with pytest.raises(RecipeError, match=r"sources\.0\.path: hf:/none: no such folder"):
        check_paths(_with_path(recipe, "hf:/none"))


def test_columns_without_a_value_are_as_if_they_were_not_there(tmp_path):
    call = {"function": {"name": "f", "arguments": json.dumps({"a": None})}}
    rows = [
        {"messages": turns("u:hi|a:ok"), "tools": None},
        {
            "messages": [
                *turns("u:call"),
                {"role": "assistant", "content": None, "tool_calls": [call]},
            ]
        },
        {"messages": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]},
    ]
    path = tmp_path / "rows.parquet"
    as_parquet(path, rows)
    made = [conversation_of(row.value or {}) for row in read_rows(path)]
    assert made == [conversation_of(row) for row in rows]


def test_columns_of_other_types_do_no_harm(tmp_path):
    table = pa.table(
        {
            "prompt": ["a", "b"],
            "when": pa.array([1, 2], pa.timestamp("us")),
            "image": pa.array([b"\xff\x00", b""], pa.binary()),
            "score": pa.array([float("nan"), 1.5]),
            "span": pa.array([1, 2], pa.duration("s")),
        }
    )
    pq.write_table(table, tmp_path / "rows.parquet")
    rows = list(read_rows(tmp_path / "rows.parquet"))
    assert [msgspec.json.decode(row.raw)["prompt"] for row in rows] == ["a", "b"]


def test_text_that_a_writer_has_not_marked_as_text_is_text(tmp_path):
    turn = pa.struct([("role", pa.binary()), ("content", pa.large_binary())])
    rows = [[{"role": b"user", "content": "wie, ö?".encode()}, {"role": b"gpt", "content": b"so"}]]
    table = pa.table({"messages": pa.array([*rows, *BYTES], pa.list_(turn))})
    pq.write_table(table, tmp_path / "rows.parquet")
    recipe, run = recipe_of(tmp_path, tmp_path / "rows.parquet"), RunDir(tmp_path / "run")
    stage.run(recipe, run)
    [sample] = samples_of(run)
    assert sample.messages == turns("u:wie, ö?|a:so")
    # What is no text is never made into some.
    [row] = quarantine_of(run)
    assert row["reason"] == "unsupported_content"


BYTES = [[{"role": b"user", "content": b"q"}, {"role": b"gpt", "content": b"\xff\xfe\x00"}]]


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow"])
@pytest.mark.parametrize(
    "when",
    [
        pa.array([2**62] * 2, pa.timestamp("us")),
        pa.array([1_700_000_000] * 2, pa.timestamp("s", "Nowhere/At_All")),
        pa.array([2**30] * 2, pa.int32()).cast(pa.date32()),
        pa.array([2**62] * 2, pa.duration("s")),
    ],
    ids=["late", "zone", "day", "long"],
)
@pytest.mark.parametrize("is_inside", [False, True])
def test_times_that_python_has_no_word_for_cost_no_row(tmp_path, name, when, is_inside):
    columns = {"prompt": pa.array(["a", "b"]), "when": when}
    if is_inside:
        texts = [pa.array(["user"] * 2), pa.array(["a", "b"]), when]
        struct = pa.StructArray.from_arrays(texts, names=["role", "content", "when"])
        columns = {"messages": pa.ListArray.from_arrays([0, 1, 2], struct)}
    table = pa.table(columns)
    if name.endswith(".parquet"):
        pq.write_table(table, tmp_path / name)
    else:
        with (tmp_path / name).open("wb") as file, ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    made = [conversation_of(row.value or {}) for row in read_rows(tmp_path / name)]
    assert [one.messages for one in made] == [turns("u:a"), turns("u:b")]


def test_a_map_is_an_object(tmp_path):
    of_text = pa.map_(pa.string(), pa.string())
    rows = [[[("role", "user"), ("content", "a")], [("role", "assistant"), ("content", "b")]]]
    pq.write_table(
        pa.table({"messages": pa.array(rows, pa.list_(of_text))}), tmp_path / "rows.parquet"
    )
    [row] = read_rows(tmp_path / "rows.parquet")
    assert conversation_of(row.value or {}).messages == turns("u:a|a:b")


def faults(path: Path) -> list[str | None]:
    return [None if row.fault is None else row.fault.reason for row in read_rows(path)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[{"a":1},{"a":2},{"a"', [None, None, "torn_file"]),
        ('[{"a":1},{"a":2}', [None, None, "torn_file"]),
        ('[{"a":1},{"a":2},', [None, None, "torn_file"]),
        ('[{"a":1},{"a":"x]', [None, "torn_file"]),
        ("[", ["torn_file"]),
        ("[]", []),
        ("[ ]\n", []),
        ('[{"a":1},]', [None]),
        ('[{"a":1},,{"a":2}]', [None, "bad_json", None]),
        ('[{"a":1},{bad},{"a":"]}{,"}]', [None, "bad_json", None]),
        ('[{"a":"\\\\"},{"b":"\\"]"}]', [None, None]),
        ('[1,"x",[{"a":1}],null,{"a":1}]', ["not_an_object"] * 4 + [None]),
        ('[{"a":1}] trailing', [None, "bad_json"]),
        ('{\n"a":1\n}\n{\n"a":2}\n', [None, None]),
        ('{\n"a":1\n},\n{\n"a":2', [None, "torn_file"]),
        ('{\n"a":1\n}}\n{"a":2}', [None, "bad_json", None]),
        ("", []),
        (" \n", ["blank"]),
    ],
)
def test_arrays_and_objects_that_are_cut_or_damaged(tmp_path, text, expected):
    path = tmp_path / "rows.json"
    path.write_text(text)
    got = ["blank" if row.is_blank else row.fault and row.fault.reason for row in read_rows(path)]
    assert got == expected


@pytest.mark.parametrize("piece", [1, 2, 7])
def test_where_a_stream_is_cut_into_pieces_changes_nothing(tmp_path, monkeypatch, piece):
    monkeypatch.setattr("paceline.rows.json_values._PIECE", piece)
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"a": '\\"]},{['}, {"b": [{"c": "]"}]}, 3]))
    assert [row.value for row in read_rows(path)] == [
        {"a": '\\"]},{['},
        {"b": [{"c": "]"}]},
        None,
    ]


def test_a_value_that_is_too_long_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.rows.raw_row.MAX_ROW_BYTES", 100)
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"a": "x" * 5000}, {"a": 1}]))
    assert faults(path) == ["line_too_long", None]
    assert len(next(iter(read_rows(path))).raw) == 100


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_a_packed_file_that_is_cut_gives_its_complete_rows(tmp_path, suffix):
    rows = [{"prompt": f"{i} {i * 7919 % 10_007} {i * 104_729 % 99_991}"} for i in range(20_000)]
    zstd = zstandard.ZstdCompressor(write_checksum=True)
    pack = gzip.compress if suffix == "gz" else zstd.compress
    packed = pack(as_jsonl(rows))
    path = tmp_path / f"rows.jsonl.{suffix}"
    path.write_bytes(packed[: len(packed) // 2])
    read = list(read_rows(path))
    assert read[-1].fault is not None
    assert read[-1].fault.reason == "torn_file"
    assert "packed file" in read[-1].fault.detail
    assert [row.value for row in read[:-1]] == rows[: len(read) - 1]
    assert len(read) > 5000
    path.write_bytes(packed[:200] + b"\0\0\0\0" + packed[204:])
    assert faults(path)[-1] == "torn_file"


def test_a_stream_of_batches_that_is_cut_gives_its_complete_batches(tmp_path):
    path = tmp_path / "rows.arrow"
    rows = [{"prompt": f"{i}" * 50} for i in range(300)]
    as_stream(path, rows, batch=50)
    path.write_bytes(path.read_bytes()[:-5000])
    read = list(read_rows(path))
    assert read[-1].fault is not None
    assert read[-1].fault.reason == "torn_file"
    assert [row.value for row in read[:-1]] == rows[: len(read) - 1]
    assert len(read) > 100
    report = stage.run(recipe_of(tmp_path, path, regenerate=True), RunDir(tmp_path / "run"))
    assert report.numbers["reasons"] == {"torn_file": 1}
    [listed] = quarantine_of(RunDir(tmp_path / "run"))
    assert listed["file"] == str(path)


@pytest.mark.parametrize(
    ("name", "make", "most"),
    [
        ("rows.json", lambda p, rows: p.write_text(json.dumps(rows)), 3_000_000),
        ("rows.parquet", lambda p, rows: as_parquet(p, rows), 6_000_000),
        (
            "rows.jsonl.gz",
            lambda p, rows: p.write_bytes(gzip.compress(as_jsonl(rows), 1)),
            3_000_000,
        ),
    ],
)
def test_memory_is_flat_for_large_files_of_every_form(tmp_path, name, make, most):
    text = "".join(chr(97 + i * i % 26) for i in range(1500))
    rows = [{"messages": turns(f"u:{i} {text}|a:{text}")} for i in range(8_000)]
    make(tmp_path / name, rows)
    rows.clear()
    tracemalloc.start()
    try:
        count = sum(row.value is not None for row in read_rows(tmp_path / name))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert count == 8_000
    assert peak < most


piece = st.one_of(
    st.just(b""),
    st.binary(max_size=4),
    st.sampled_from(
        [b'"', b"\\", b"[", b"]", b"{", b"}", b",", b"\n", b"\0", b"NaN", b"\xef\xbb\xbf"]
    ),
    st.just(b'{"a":' * 500),
    st.just(b"9" * 400),
    st.just(b'"\\ud800"'),
)


@settings(max_examples=2000, deadline=None)
@given(
    name=st.sampled_from(sorted(FORMS)),
    at=st.integers(0, 10**6),
    put=piece,
    drop=st.sampled_from([0, 0, 1, 3, 50, 10**9]),
)
def test_property_damage_costs_what_it_hits_and_ends_nothing(
    made, tmp_path_factory, name, at, put, drop
):
    whole = made[name].read_bytes()
    at %= len(whole) + 1
    path = made[name].parent.parent / "hurt" / name
    path.write_bytes(whole[:at] + put + whole[at + drop :])
    if name.endswith((".parquet", ".arrow")):
        with suppress(DataError):
            assert len(list(read_rows(path))) <= 8
        return
    rows = list(read_rows(path))
    if not name.endswith((".gz", ".zst")):
        # What no longer begins as an array or an object is read line by line.
        assert len(rows) <= 40 + path.read_bytes().count(b"\n")
    lines = [row.line for row in rows]
    assert lines == sorted(set(lines))
    good = [row.value for row in rows if row.value is not None]
    assert all((row.value is None) or (row.fault is None) for row in rows)
    if name.endswith((".gz", ".zst")) or name.startswith(("data", "indented")):
        return
    # Records that end before the damage are read, whatever follows.
    # What comes right behind a record, before the comma or the line feed, makes it another one.
    whole_ones = _plain(name, whole[: max(0, at - 2)])
    before = [row for row in ROWS if json.dumps(row).encode() in whole_ones]
    assert good[: len(before)] == before


def _plain(name: str, data: bytes) -> bytes:
    if name in ("bom.json", "pretty.json"):
        return b""
    return data


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forms")
    (folder / "whole").mkdir()
    (folder / "hurt").mkdir()
    for name, make in FORMS.items():
        make(folder / "whole" / name)
    return {name: folder / "whole" / name for name in FORMS}
