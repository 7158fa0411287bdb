import hashlib
import json
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fixtures_chatml import byte_chatml, turns
from fixtures_corpus import write_jsonl
from paceline.durable.errors import DataError
from paceline.rows import raw_row
from paceline.rows.conversation import conversation_of
from paceline.rows.formats import read_rows
from paceline.rows.ids import prompt_id, prompt_turns, sample_id, split_of
from paceline.rows.overlap import Overlap, grams_of
from paceline.rows.rejection import RowRejected
from paceline.target.chat import rendering_identity, tokenizer_digest
from paceline.types import Split

OPENAI = {"messages": turns("s:be nice|u:hi|a:ok")}
SHAREGPT = {
    "conversations": [
        {"from": "system", "value": "be nice"},
        {"from": "human", "value": "hi"},
        {"from": "gpt", "value": "ok"},
    ]
}


def faults(path, limit=None):
    return [(row.line, row.fault.reason if row.fault else None) for row in read_rows(path, limit)]


def rejected(row) -> str:
    with pytest.raises(RowRejected) as caught:
        conversation_of(row)
    return caught.value.reason


def test_t_16_bad_lines_are_named_and_good_ones_read(tmp_path):
    path = tmp_path / "rows.jsonl"
    good = json.dumps(OPENAI).encode()
    path.write_bytes(b"\n".join([good, good, b'{"id":3,"conv', b"", b"\xff\xfe"]))
    assert faults(path) == [
        (1, None),
        (2, None),
        (3, "bad_json"),
        (4, None),
        (5, "bad_utf8"),
    ]
    assert [row.is_blank for row in read_rows(path)] == [False, False, False, True, False]


def test_t_16_bom_and_crlf(tmp_path):
    path = tmp_path / "rows.jsonl"
    good = json.dumps(OPENAI).encode()
    path.write_bytes(b"\xef\xbb\xbf" + good + b"\r\n" + good + b"\r\n")
    assert [row.value for row in read_rows(path)] == [OPENAI, OPENAI]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"[1]", "not_an_object"),
        (b'"text"', "not_an_object"),
        (b"null", "not_an_object"),
        (b'{"a": NaN}', "bad_json"),
        (b'{"a": "\\ud800"}', "bad_json"),
        (b"[" * 100_000, "bad_json"),
        (b'{"a": 1} {"b": 2}', "bad_json"),
    ],
)
def test_lines_that_are_no_rows(tmp_path, line, reason):
    assert faults(write_jsonl(tmp_path / "rows.jsonl", [line])) == [(1, reason)]


def test_json_arrays_and_lines_under_the_name_json(tmp_path):
    array = tmp_path / "array.json"
    array.write_bytes(b"\xef\xbb\xbf\r\n" + json.dumps([OPENAI, 1, SHAREGPT], indent=1).encode())
    assert faults(array) == [(1, None), (2, "not_an_object"), (3, None)]
    assert faults(array, limit=2) == [(1, None), (2, "not_an_object")]
    lines = write_jsonl(tmp_path / "lines.json", [OPENAI, SHAREGPT])
    assert [row.value for row in read_rows(lines)] == [OPENAI, SHAREGPT]


def test_files_that_are_no_source(tmp_path):
    with pytest.raises(DataError, match=r"absent\.jsonl: no such file"):
        list(read_rows(tmp_path / "absent.jsonl"))
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"rows\.parquet: not a whole Parquet file"):
        list(read_rows(tmp_path / "rows.parquet"))
    (tmp_path / "rows.csv").write_bytes(b"a,b")
    with pytest.raises(DataError, match=r"rows\.csv: unknown form '\.csv'"):
        list(read_rows(tmp_path / "rows.csv"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty: a folder without data"):
        list(read_rows(tmp_path / "empty"))


def test_limit_counts_rows_not_blank_lines(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [b"", OPENAI, b"", b"{", SHAREGPT])
    assert faults(path, limit=2) == [(1, None), (2, None), (3, None), (4, "bad_json")]
    assert len(faults(path, limit=9)) == 5


def test_an_endless_line_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr(raw_row, "MAX_ROW_BYTES", 1000)
    exact = json.dumps({"a": "x" * 990}).encode()
    assert len(exact) == 1000 - 1
    path = write_jsonl(tmp_path / "rows.jsonl", [b"x" * 10_500, exact, b"y" * 1001])
    assert faults(path) == [(1, "line_too_long"), (2, None), (3, "line_too_long")]
    assert len(next(iter(read_rows(path))).raw) == 1000


def test_memory_is_flat_for_a_large_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    line = json.dumps({"messages": turns("u:" + "x" * 2000 + "|a:" + "y" * 1000)}).encode() + b"\n"
    with path.open("wb") as file:
        file.writelines(line for _ in range(30_000_000 // len(line)))
    tracemalloc.start()
    try:
        count = sum(1 for _ in read_rows(path))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert count == 30_000_000 // len(line)
    assert peak < 1_000_000


def test_sharegpt_and_openai_rows_are_the_same_conversation():
    assert conversation_of(SHAREGPT) == conversation_of(OPENAI)
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    as_parts = {"messages": [*turns("s:be nice"), {"role": "user", "content": parts}]}
    assert conversation_of(as_parts).messages == turns("s:be nice|u:hi")


@pytest.mark.parametrize("row", [SHAREGPT, OPENAI])
def test_keys_of_another_dialect_without_a_value_hide_nothing(row):
    key = "conversations" if "conversations" in row else "messages"
    nothing = dict.fromkeys(("role", "from", "content", "value", "tool_calls", "function_call"))
    both = [{**nothing, **turn} for turn in row[key]]
    assert conversation_of({"messages": None, **row, key: both}) == conversation_of(OPENAI)


def test_a_call_in_the_form_before_there_could_be_several_is_a_call():
    old = {"name": "add", "arguments": '{"a": 1}'}
    row = {
        "messages": [
            *turns("u:1 and?"),
            {"role": "assistant", "content": None, "function_call": old},
            {"role": "function", "name": "add", "content": "2"},
        ]
    }
    [_, call, result] = conversation_of(row).messages
    function = {"name": "add", "arguments": {"a": 1}}
    assert call["tool_calls"] == [{"type": "function", "function": function}]
    assert result == {"role": "tool", "name": "add", "content": "2"}


def test_prompt_rows():
    assert conversation_of({"prompt": "hi"}).messages == turns("u:hi")
    assert conversation_of({"prompt": turns("s:x|u:hi")}).messages == turns("s:x|u:hi")
    assert conversation_of({"system": "x", "prompt": "hi"}).messages == turns("s:x|u:hi")
    both = {"prompt": "hi", "messages": turns("u:hi|a:ok")}
    assert conversation_of(both).messages == turns("u:hi|a:ok")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({}, "no_conversation"),
        ({"text": "hi"}, "no_conversation"),
        ({"messages": []}, "empty_conversation"),
        ({"messages": "hi"}, "bad_conversation"),
        ({"prompt": 3}, "bad_conversation"),
        ({"messages": ["hi"]}, "bad_turn"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, "unknown_role"),
        ({"messages": [{"content": "x"}]}, "unknown_role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "unknown_role"),
        ({"messages": [{"role": "user", "content": 3}]}, "unsupported_content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "content_image_url",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": {"a": 1}}]}, "bad_tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "bad_tool_calls"),
        ({"messages": [{"role": "assistant", "function_call": "f"}]}, "bad_tool_calls"),
        ({"messages": turns("u:hi"), "tools": {"name": "f"}}, "bad_tools_json"),
    ],
)
def test_rows_that_are_no_conversation(row, reason):
    assert rejected(row) == reason


scalar = st.sampled_from([None, True, 0, 1.5, "", "hi", "user", "[", "{}", '[{"name": "f"}]'])
json_value = scalar | st.lists(scalar, max_size=2) | st.dictionaries(st.just("text"), scalar)
keys = ("messages", "conversations", "prompt", "tools", "system", "role", "content", "from")
turn = st.dictionaries(st.sampled_from([*keys[5:], "value", "tool_calls"]), json_value, max_size=3)
near_rows = st.dictionaries(
    st.sampled_from(keys), json_value | st.lists(turn, max_size=3), max_size=3
)


@settings(max_examples=150, deadline=None)
@given(row=near_rows)
def test_property_any_object_is_a_conversation_or_is_rejected(row):
    try:
        messages = conversation_of(row).messages
    except RowRejected as error:
        reason, messages = error.reason, None
    else:
        reason = None
    if messages is None:
        assert reason is not None
        assert reason.isidentifier()
    else:
        assert messages
        assert all(isinstance(m["content"], str) for m in messages)


def test_prompt_turns_end_with_the_last_user_turn():
    assert prompt_turns(turns("s:x|u:1|a:2|u:3|a:4")) == turns("s:x|u:1|a:2|u:3")
    assert prompt_turns(turns("s:x|a:4")) == []


def test_t_18_ids_depend_on_content_alone():
    tokenizer = byte_chatml()
    identity = rendering_identity(tokenizer, {})
    rows = turns("u:hi|a:ok")
    base = sample_id(rows, None, identity)
    assert len(base) == 32
    assert int(base, 16)
    assert sample_id([dict(reversed(m.items())) for m in rows], None, identity) == base
    others = [
        sample_id(turns("u:hi|a:ok!"), None, identity),
        sample_id(rows, [{"name": "f"}], identity),
        sample_id(rows, None, rendering_identity(tokenizer, {"enable_thinking": False})),
        sample_id(rows, None, rendering_identity(byte_chatml(extra="é"), {})),
        sample_id(rows, None, rendering_identity(byte_chatml("{{ messages }}"), {})),
    ]
    assert len({base, *others}) == 6
    assert prompt_id(prompt_turns(rows), None) == prompt_id(turns("u:hi"), None)


def test_t_18_golden_ids():
    hi = '{"content":"hi","role":"user"}'
    ok = '{"content":"ok","role":"assistant"}'
    hashed = {
        sample_id(turns("u:hi|a:ok"), None, "0" * 32): f'["sample",[{hi},{ok}],null,"{"0" * 32}"]',
        prompt_id(turns("u:hi"), None): f'["prompt",[{hi}],null]',
        prompt_id(turns("u:hi"), [{"b": 1, "a": "ö"}]): f'["prompt",[{hi}],[{{"a":"ö","b":1}}]]',
    }
    for digest, text in hashed.items():
        assert digest == hashlib.sha256(text.encode()).hexdigest()[:32]
    assert prompt_id(turns("u:hi"), None) == "39556e69d7fe305e7d862ff4a9f11896"


def test_the_last_calls_padding_is_no_part_of_a_tokenizer():
    tokenizer = byte_chatml()
    before = tokenizer_digest(tokenizer)
    tokenizer.pad_token = "<|unk|>"
    before_padding = tokenizer_digest(tokenizer)
    tokenizer(["a", "bcd"], padding=True, truncation=True, max_length=2)
    assert tokenizer_digest(tokenizer) == before_padding == before


def test_split_is_a_share_of_the_prompts_and_seeded():
    prompts = [prompt_id(turns(f"u:{i}"), None) for i in range(4000)]
    first = [split_of(prompt, 0, 0.05) for prompt in prompts]
    assert first.count(Split.VALIDATION) == pytest.approx(200, abs=60)
    assert first != [split_of(prompt, 1, 0.05) for prompt in prompts]
    assert {split_of(prompt, 0, 0.0) for prompt in prompts} == {Split.TRAIN}
    assert {split_of(prompt, 0, 1.0) for prompt in prompts} == {Split.VALIDATION}
    larger = [split_of(prompt, 0, 0.10) for prompt in prompts]
    assert first.count(Split.VALIDATION) < larger.count(Split.VALIDATION)
    moved = [a for a, b in zip(first, larger, strict=True) if a is Split.VALIDATION and a is not b]
    assert moved == [], "a larger fraction only adds prompts to the validation split"


def test_overlap_counts_shared_runs_of_eight_words():
    words = [f"w{i}" for i in range(20)]
    overlap = Overlap()

    def said(text, role="user"):
        return grams_of([{"role": role, "content": text}])

    overlap.add_heldout("bench", said(" ".join(words[:10])))
    overlap.add_heldout("bench", said("something else altogether"))
    overlap.add_heldout("short", said("Write a  POEM"))
    overlap.add_train(said("zero " + " ".join(words[1:10]).upper()))
    overlap.add_train(said("something else altogether", "system"))
    overlap.add_train(said("write a poem"))
    counts = overlap.counts()
    assert counts["bench"].numbers() == {
        "prompts": 2,
        "touched_prompts": 1,
        "touched_fraction": 0.5,
        "grams": 4,
        "shared_grams": 2,
        "shared_fraction": 0.5,
    }
    assert counts["short"].touched_prompts == 1
