import json
import random
import tracemalloc

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fixtures_chatml import ALTERNATING, CHATML, byte_chatml, save_tokenizer, turns
from fixtures_corpus import quarantine_of, reasons_of, recipe_of, samples_of, write_jsonl
from paceline.corpus import intake, stage
from paceline.durable.errors import DataError, RecipeChanged, RecipeError, TargetError
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import Recipe, SourceRecipe, TargetRecipe
from paceline.rows.ids import sample_id
from paceline.target.chat import rendering_identity
from paceline.types import Split


def rows(count, start=0):
    return [
        {"messages": turns(f"u:question {i}|a:answer {i}")} for i in range(start, start + count)
    ]


def events_of(run_dir):
    lines = (run_dir.events / "prepare.jsonl").read_bytes().splitlines()
    return [msgspec.json.decode(line) for line in lines]


@pytest.fixture
def run_dir(tmp_path):
    return RunDir(tmp_path / "run")


def test_golden_sample_line(tmp_path, run_dir):
    source = write_jsonl(tmp_path / "one.jsonl", [{"messages": turns("u:hi|a:ok")}])
    stage.run(recipe_of(tmp_path, source), run_dir)
    line = json.loads(run_dir.prepared.read_bytes())
    identity = rendering_identity(byte_chatml(), {})
    assert line == {
        "sample_id": sample_id(turns("u:hi|a:ok"), None, identity),
        "prompt_id": "39556e69d7fe305e7d862ff4a9f11896",
        "source": "one",
        "split": "train",
        "messages": turns("u:hi|a:ok"),
        "tools": None,
        "input_ids": byte_chatml().encode(
            "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nok<|im_end|>\n"
        ),
        "loss_spans": [[21, 24]],
        "finish": None,
    }


def test_t_16_counts_and_strict(tmp_path, run_dir):
    good = [json.dumps(row).encode() for row in rows(2)]
    source = tmp_path / "five.jsonl"
    source.write_bytes(b"\n".join([*good, b'{"id":3,"conv', b"", b"\xff\xfe"]))
    report = stage.run(recipe_of(tmp_path, source), run_dir)
    five = report.numbers["sources"]["five"]
    assert (five["read"], five["accepted"], five["quarantined"], five["blank"]) == (5, 2, 2, 1)
    assert "five: read 5 = accepted 2 + quarantined 2 + blank 1" in report.lines
    listed = quarantine_of(run_dir)
    assert [(r["line"], r["reason"]) for r in listed] == [(3, "bad_json"), (5, "bad_utf8")]
    assert all(r["file"] == str(source) and r["detail"] for r in listed)
    assert listed[0]["raw"] == '{"id":3,"conv'
    assert listed[1]["raw"] == "\\xff\\xfe"

    strict = RunDir(tmp_path / "strict")
    with pytest.raises(DataError, match="2 of 5 rows") as caught:
        stage.run(recipe_of(tmp_path, source, strict=True), strict)
    assert caught.value.exit_code == 2
    assert reasons_of(strict) == ["bad_json", "bad_utf8"]
    assert not strict.prepared.exists()
    assert [event["kind"] for event in events_of(strict)] == ["start", "failed"]


def test_t_16_bom_and_crlf_all_accepted(tmp_path, run_dir):
    source = tmp_path / "windows.jsonl"
    lines = b"\r\n".join(json.dumps(row).encode() for row in rows(3))
    source.write_bytes(b"\xef\xbb\xbf" + lines + b"\r\n")
    report = stage.run(recipe_of(tmp_path, source, strict=True), run_dir)
    assert report.numbers["accepted"] == 3


def test_t_02_t_04_a_raising_template_costs_its_row_alone(tmp_path, run_dir):
    data = [
        {"messages": turns("u:a|u:b|a:c")},
        {"messages": turns("a:x|u:hi|a:ok")},
        {"messages": turns("u:hi|a:ok")},
    ]
    source = write_jsonl(tmp_path / "rows.jsonl", data)
    report = stage.run(recipe_of(tmp_path, source, tokenizer=byte_chatml(ALTERNATING)), run_dir)
    assert report.numbers["reasons"] == {"template_rejected": 2}
    assert [s.loss_spans for s in samples_of(run_dir)] == [[(21, 24)]]
    assert "must alternate" in quarantine_of(run_dir)[0]["detail"]


def test_t_08_truncation_is_counted_and_so_are_its_tokens(tmp_path, run_dir):
    source = write_jsonl(tmp_path / "rows.jsonl", [{"messages": turns("u:hi|a:" + "x" * 100)}])
    report = stage.run(recipe_of(tmp_path, source, max_length=30), run_dir)
    assert report.numbers["truncated"] == 1
    assert report.numbers["tokens"]["train"] == 30
    assert report.numbers["loss_tokens"]["train"] == 9
    assert report.numbers["trainable_share"] == pytest.approx(0.3)


@pytest.mark.parametrize("regenerate", [False, True])
def test_t_09_nothing_left_is_an_error(tmp_path, run_dir, regenerate):
    source = write_jsonl(tmp_path / "rows.jsonl", [{"messages": turns("u:" + "x" * 100 + "|a:ok")}])
    recipe = recipe_of(tmp_path, source, max_length=50, regenerate=regenerate)
    with pytest.raises(DataError, match="1 prompt_exceeds_max_length") as caught:
        stage.run(recipe, run_dir)
    assert caught.value.exit_code == 2
    assert reasons_of(run_dir) == ["prompt_exceeds_max_length"]
    assert not run_dir.prepared.exists()


def test_t_18_ids_survive_order_limit_file_and_dialect(tmp_path):
    data = rows(40)
    shuffled = random.Random(7).sample(data, len(data))
    names = {"user": "human", "assistant": "gpt"}
    sharegpt = [
        {
            "id": i,
            "conversations": [
                {"from": names[m["role"]], "value": m["content"]} for m in row["messages"]
            ],
        }
        for i, row in enumerate(data)
    ]
    array = tmp_path / "array.json"
    array.write_text(json.dumps(data))
    sources = [
        write_jsonl(tmp_path / "plain.jsonl", data),
        write_jsonl(tmp_path / "shuffled.jsonl", shuffled),
        write_jsonl(tmp_path / "sharegpt.jsonl", sharegpt),
        array,
        SourceRecipe(path=str(tmp_path / "shuffled.jsonl"), limit=11),
        write_jsonl(tmp_path / "more.jsonl", [*rows(9, start=100), *data]),
    ]
    found = []
    for i, source in enumerate(sources):
        run_dir = RunDir(tmp_path / f"run{i}")
        stage.run(recipe_of(tmp_path, source, validation_fraction=0.3), run_dir)
        found.append({s.messages[0]["content"]: s for s in samples_of(run_dir)})
    plain = found[0]
    assert len(plain) == 40
    assert {s.split for s in plain.values()} == {Split.TRAIN, Split.VALIDATION}
    for other in found[1:]:
        for question in other.keys() & plain.keys():
            a, b = plain[question], other[question]
            assert (a.sample_id, a.prompt_id, a.split) == (b.sample_id, b.prompt_id, b.split)
            assert a.input_ids == b.input_ids
    assert [len(f) for f in found] == [40, 40, 40, 40, 11, 49]


def test_duplicates_the_first_is_kept(tmp_path, run_dir):
    data = [*rows(2), *rows(1), {"messages": turns("u:question 0|a:another")}]
    source = write_jsonl(tmp_path / "rows.jsonl", data)
    stage.run(recipe_of(tmp_path, source), run_dir)
    kept = samples_of(run_dir)
    [duplicate] = quarantine_of(run_dir)
    assert len(kept) == 3
    assert (duplicate["reason"], duplicate["line"]) == ("duplicate", 3)
    assert duplicate["sample_id"] == kept[0].sample_id
    assert duplicate["prompt_id"] == kept[2].prompt_id == kept[0].prompt_id


def test_regenerate_takes_the_prompt_alone(tmp_path, run_dir):
    data = [
        {"messages": turns("u:1|a:22|u:3|a:4444")},
        {"messages": turns("u:1|a:22|u:3|a:another answer")},
        {"prompt": "no answer at all"},
        {"messages": turns("s:only a system turn|a:x")},
    ]
    source = write_jsonl(tmp_path / "rows.jsonl", data)
    report = stage.run(recipe_of(tmp_path, source, regenerate=True), run_dir)
    first, second = samples_of(run_dir)
    assert first.messages == turns("u:1|a:22|u:3")
    assert byte_chatml().decode(first.input_ids).endswith("3<|im_end|>\n<|im_start|>assistant\n")
    assert second.messages == turns("u:no answer at all")
    assert first.loss_spans == second.loss_spans == []
    assert reasons_of(run_dir) == ["duplicate", "no_user_turn"]
    assert report.numbers["trainable_share"] == 0.0

    answered = RunDir(tmp_path / "answered")
    stage.run(recipe_of(tmp_path, source), answered)
    assert {s.prompt_id for s in samples_of(answered)} == {first.prompt_id}
    assert reasons_of(answered) == ["no_answer", "no_user_turn"]


def test_heldout_prompts_never_reach_training(tmp_path, run_dir):
    bench = write_jsonl(
        tmp_path / "bench.jsonl",
        [{"prompt": "question 1"}, {"prompt": "unseen"}, {"prompt": "unseen"}],
    )
    train = write_jsonl(tmp_path / "rows.jsonl", rows(4))
    recipe = recipe_of(tmp_path, train, SourceRecipe(path=str(bench), name="b", split="heldout"))
    report = stage.run(recipe, run_dir)
    assert [(r["source"], r["line"], r["reason"]) for r in quarantine_of(run_dir)] == [
        ("b", 3, "duplicate"),
        ("rows", 2, "in_heldout"),
    ]
    by_split = {split: [s for s in samples_of(run_dir) if s.split is split] for split in Split}
    assert [s.messages for s in by_split[Split.HELDOUT]] == [
        turns("u:question 1"),
        turns("u:unseen"),
    ]
    assert all(s.loss_spans == [] and s.source == "b" for s in by_split[Split.HELDOUT])
    assert len(by_split[Split.TRAIN]) == 3
    assert report.numbers["samples"] == {"train": 3, "validation": 0, "heldout": 2}
    assert report.numbers["overlap"]["b"]["touched_prompts"] == 0


def test_overlap_is_reported_per_heldout_source(tmp_path, run_dir):
    text = "one two three four five six seven eight nine"
    bench = write_jsonl(tmp_path / "bench.jsonl", [{"prompt": text}, {"prompt": "other"}])
    train = write_jsonl(
        tmp_path / "rows.jsonl", [{"messages": turns(f"u:{text} ten|a:answer")}, *rows(2)]
    )
    recipe = recipe_of(tmp_path, train, SourceRecipe(path=str(bench), split="heldout"))
    report = stage.run(recipe, run_dir)
    overlap = report.numbers["overlap"]["bench"]
    assert (overlap["touched_prompts"], overlap["touched_fraction"]) == (1, 0.5)
    assert (overlap["shared_grams"], overlap["grams"]) == (2, 3)
    assert any("1 of 2 prompts share a run of 8 words" in line for line in report.lines)


def test_a_second_run_does_nothing_and_damage_is_redone(tmp_path, run_dir):
    source = write_jsonl(tmp_path / "rows.jsonl", rows(5))
    recipe = recipe_of(tmp_path, source)
    first = stage.run(recipe, run_dir)
    content = run_dir.prepared.read_bytes()
    stamp = run_dir.prepared.stat().st_mtime_ns
    second = stage.run(recipe, run_dir)
    assert second.skipped
    assert second.numbers == first.numbers
    assert run_dir.prepared.stat().st_mtime_ns == stamp
    run_dir.prepared.write_bytes(content[:-3])
    assert not stage.run(recipe, run_dir).skipped
    assert run_dir.prepared.read_bytes() == content
    assert not list(run_dir.corpus.glob("*.partial"))


def test_moved_files_are_the_same_recipe_and_changed_ones_are_not(tmp_path, run_dir):
    source = write_jsonl(tmp_path / "rows.jsonl", rows(5))
    stage.run(recipe_of(tmp_path, source), run_dir)
    (tmp_path / "moved").mkdir()
    moved = source.rename(tmp_path / "moved" / "rows.jsonl")
    assert stage.run(recipe_of(tmp_path / "moved", moved), run_dir).skipped
    write_jsonl(moved, rows(6))
    with pytest.raises(RecipeChanged, match=r"sources\.0\.content"):
        stage.run(recipe_of(tmp_path, moved), run_dir)
    with pytest.raises(RecipeChanged, match=r"corpus\.max_length: 2048 -> 40"):
        stage.run(recipe_of(tmp_path, moved, max_length=40), run_dir)


def test_events_name_counts(tmp_path, run_dir, monkeypatch):
    monkeypatch.setattr(intake, "_PROGRESS_SECONDS", 0.0)
    source = write_jsonl(tmp_path / "rows.jsonl", [*rows(3), b"{", b""])
    stage.run(recipe_of(tmp_path, source), run_dir)
    events = events_of(run_dir)
    assert [e["kind"] for e in events] == ["start", "progress", "finished"]
    last = events[-1]
    assert (last["total"], last["done"], last["quarantined"]) == (5, 5, {"bad_json": 1})
    assert last["report"]["accepted"] == 3
    assert last["report"]["blank"] == 1
    assert last["tokens"] == sum(len(s.input_ids) for s in samples_of(run_dir))


def test_errors_that_end_the_run(tmp_path, run_dir):
    source = write_jsonl(tmp_path / "rows.jsonl", rows(3))
    with pytest.raises(DataError, match=r"absent\.jsonl"):
        stage.run(recipe_of(tmp_path, tmp_path / "absent.jsonl"), run_dir)
    with pytest.raises(DataError, match="validation split"):
        stage.run(recipe_of(tmp_path, source, validation_fraction=1.0), RunDir(tmp_path / "v"))
    with pytest.raises(RecipeError, match=r"template_args\.tokenize"):
        stage.run(recipe_of(tmp_path, source, template_args={"tokenize": True}), run_dir)


def test_a_template_that_tells_nothing_apart_is_an_error(tmp_path, run_dir):
    markup = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    rows = [{"messages": [{"role": "user"}, {"role": "assistant", "content": "abc"}]}]
    source = write_jsonl(tmp_path / "rows.jsonl", rows)
    with pytest.raises(DataError, match="100% of 3 tokens are trainable"):
        stage.run(recipe_of(tmp_path, source, tokenizer=byte_chatml(markup)), run_dir)


def test_a_bad_recipe_fails_before_the_tokenizer_is_touched(tmp_path, run_dir):
    recipe = recipe_of(tmp_path, tmp_path / "absent.jsonl")
    with pytest.raises(DataError, match="absent"):
        stage.run(Recipe(target=TargetRecipe(path="nowhere"), corpus=recipe.corpus), run_dir)
    assert not run_dir.root.exists()


def test_targets_without_tokenizer_or_template(tmp_path, run_dir):
    source = write_jsonl(tmp_path / "rows.jsonl", rows(1))
    corpus = recipe_of(tmp_path, source).corpus
    bare = byte_chatml()
    bare.chat_template = None
    save_tokenizer(tmp_path / "bare", bare)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text('{"model_type": "llama"}')
    save_tokenizer(tmp_path / "broken")
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    for name, message in [
        ("absent", "no such folder"),
        ("empty", "no tokenizer in this folder"),
        ("bare", "no chat template"),
        ("broken", "does not load"),
    ]:
        recipe = Recipe(target=TargetRecipe(path=str(tmp_path / name)), corpus=corpus)
        with pytest.raises(TargetError, match=message):
            stage.run(recipe, run_dir)


@pytest.mark.parametrize(
    ("prefix", "template_args", "warned"),
    [
        ("", {}, None),
        ("{{ strftime_now('%Y') }}", {}, "depend on the day"),
        ("{{ date_string or strftime_now('%Y') }}", {}, "date_string fixes it"),
        ("{{ date_string or strftime_now('%Y') }}", {"date_string": "1 Jan"}, None),
    ],
)
def test_a_template_that_writes_the_date(tmp_path, run_dir, prefix, template_args, warned):
    tokenizer = byte_chatml(prefix + CHATML)
    source = write_jsonl(tmp_path / "rows.jsonl", rows(2))
    recipe = recipe_of(tmp_path, source, tokenizer=tokenizer, template_args=template_args)
    report = stage.run(recipe, run_dir)
    warnings = [line for line in report.lines if "the chat template" in line]
    assert len(warnings) == (warned is not None)
    assert all(str(warned) in line for line in warnings)


line = st.one_of(
    st.binary(max_size=12).filter(lambda b: b"\n" not in b),
    st.sampled_from([b"", b"  \r", b"{}", b"[]", b'{"prompt": "x"}', b'{"messages": []}']),
    st.builds(
        lambda text, cut, at: text[: at % len(text)] if cut else text,
        st.integers(0, 5).map(lambda i: json.dumps(rows(1, start=i)[0]).encode()),
        st.booleans(),
        st.integers(0, 200),
    ),
)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(train=st.lists(line, max_size=12), bench=st.lists(line, max_size=6), last=st.booleans())
@pytest.mark.parametrize("regenerate", [False, True])
def test_property_counts_add_up_on_damaged_files(tmp_path_factory, regenerate, train, bench, last):
    tmp_path = tmp_path_factory.mktemp("damaged")
    paths = {}
    for name, lines in (("train", train), ("bench", bench)):
        paths[name] = tmp_path / f"{name}.jsonl"
        paths[name].write_bytes(b"\n".join(lines) + (b"\n" if last and lines else b""))
    recipe = recipe_of(
        tmp_path,
        paths["train"],
        SourceRecipe(path=str(paths["bench"]), split="heldout"),
        regenerate=regenerate,
    )
    run_dir = RunDir(tmp_path / "run")
    refusal = ""
    report = None
    try:
        report = stage.run(recipe, run_dir)
    except DataError as error:
        refusal = str(error)
    if report is None:
        assert "No training row is left" in refusal
        assert not run_dir.prepared.exists()
        return
    listed = quarantine_of(run_dir)
    kept = samples_of(run_dir)
    for name, path in paths.items():
        content = path.read_bytes()
        lines = content.split(b"\n")[: None if not content.endswith(b"\n") else -1]
        numbers = report.numbers["sources"][name]
        assert numbers["read"] == (len(lines) if content else 0)
        assert numbers["accepted"] == sum(s.source == name for s in kept)
        assert numbers["quarantined"] == sum(r["source"] == name for r in listed)
        # A byte order mark is no part of the first line.
        said = [one.removeprefix(b"\xef\xbb\xbf") if i == 0 else one for i, one in enumerate(lines)]
        assert numbers["blank"] == sum(not one.strip() for one in said) * bool(content)
        assert numbers["read"] == numbers["accepted"] + numbers["quarantined"] + numbers["blank"]
    assert len({s.sample_id for s in kept}) == len(kept)


def test_memory_of_a_whole_run_stays_flat(tmp_path, run_dir):
    source = tmp_path / "big.jsonl"
    padding = "x" * 50_000
    with source.open("wb") as file:
        for i in range(600):
            row = {"note": padding, "messages": turns(f"u:question {i}|a:answer {i}")}
            file.write(json.dumps(row).encode() + b"\n")
    assert source.stat().st_size > 30_000_000
    recipe = recipe_of(tmp_path, write_jsonl(tmp_path / "warm.jsonl", rows(2)))
    stage.run(recipe, RunDir(tmp_path / "warm"))
    tracemalloc.start()
    try:
        report = stage.run(recipe_of(tmp_path, source), run_dir)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert report.numbers["accepted"] == 600
    # The checksum of the source holds two blocks of 8 MiB; the rows take far less.
    assert peak < 18 << 20
