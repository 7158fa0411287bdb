import numpy as np
import pytest

from fixtures_chatml import ALTERNATING, END, THINKING, byte_chatml, turns
from fixtures_corpus import quarantine_of, recipe_of, samples_of, write_jsonl
from paceline.corpus import stage
from paceline.corpus.coverage import TokenCoverage
from paceline.durable.errors import RecipeError
from paceline.recipe.check import check_recipe
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import SourceRecipe


@pytest.fixture
def prepared(tmp_path):
    def prepare(rows, *sources, tokenizer=None, regenerate=False, **corpus):
        data = write_jsonl(tmp_path / "rows.jsonl", rows)
        number = len(list(tmp_path.glob("run*")))
        run_dir = RunDir(tmp_path / f"run{number}")
        recipe = recipe_of(
            tmp_path, data, *sources, tokenizer=tokenizer, regenerate=regenerate, **corpus
        )
        report = stage.run(recipe, run_dir)
        return report, samples_of(run_dir), quarantine_of(run_dir)

    return prepare


def said(text: str) -> dict:
    return {"messages": turns(text)}


GOOD = said("u:hi|a:all is well")


def texts(sample) -> list[str]:
    tokenizer = byte_chatml()
    return [tokenizer.decode(sample.input_ids[a:b]) for a, b in sample.loss_spans]


@pytest.mark.parametrize(
    ("policy", "kept", "note"),
    [("keep", "leading_assistant_keep", 2), ("context_only", "leading_assistant_context_only", 1)],
)
def test_a_leading_assistant_turn_is_counted(prepared, policy, kept, note):
    report, samples, _ = prepared([said("a:x|u:hi|a:ok"), GOOD], leading_assistant=policy)
    assert report.numbers["notes"] == {kept: 1}
    assert len(samples[0].loss_spans) == note
    assert any("begin with an assistant turn" in line for line in report.lines)


def test_a_leading_assistant_turn_may_cost_the_row(prepared):
    report, _, _ = prepared([said("a:x|u:hi|a:ok"), GOOD], leading_assistant="drop")
    assert report.numbers["reasons"] == {"leading_assistant": 1}


def test_consecutive_roles_are_kept_joined_or_excluded(prepared):
    rows = [said("u:a|u:b|a:c|a:d|t:1|t:2|a:e"), GOOD]
    report, [first, _], _ = prepared(rows)
    assert report.numbers["notes"] == {"consecutive_roles_keep": 1}
    assert texts(first) == [f"c{END}", f"d{END}", f"e{END}"]
    report, [first, _], _ = prepared(rows, consecutive_roles="merge")
    assert report.numbers["notes"] == {"consecutive_roles_merge": 1}
    assert [m["content"] for m in first.messages] == ["a\n\nb", "c\n\nd", "1", "2", "e"]
    assert texts(first) == [f"c\n\nd{END}", f"e{END}"]
    report, _, _ = prepared(rows, consecutive_roles="exclude")
    assert report.numbers["reasons"] == {"consecutive_roles": 1}


def test_joined_turns_satisfy_a_template_that_wants_turns_to_alternate(prepared):
    rows = [said("u:a|u:b|a:c"), GOOD]
    tokenizer = byte_chatml(ALTERNATING)
    report, _, _ = prepared(rows, tokenizer=tokenizer, consecutive_roles="merge")
    assert report.numbers["accepted"] == 2


def test_turns_with_more_than_text_are_never_joined(prepared):
    call = {"function": {"name": "f", "arguments": {}}}
    row = said("u:a|a:b|a:c")
    row["messages"][2]["tool_calls"] = [call]
    report, _, listed = prepared([row, GOOD], consecutive_roles="merge")
    assert report.numbers["reasons"] == {"consecutive_roles": 1}
    assert "cannot be joined" in listed[0]["detail"]


def test_roles_of_unknown_names_are_what_the_recipe_says(prepared):
    row = {
        "messages": [
            {"role": "Customer", "content": "hi"},
            {"role": "expert", "content": "ok"},
        ]
    }
    report, _, listed = prepared([row, GOOD])
    assert report.numbers["reasons"] == {"unknown_role": 1}
    assert "'Customer'; corpus.roles can say" in listed[0]["detail"]
    roles = {"customer": "user", "Expert": "assistant"}
    report, [first, _], _ = prepared([row, GOOD], roles=roles)
    assert first.messages == turns("u:hi|a:ok")


def test_a_role_map_to_no_role_is_refused(tmp_path):
    data = write_jsonl(tmp_path / "rows.jsonl", [GOOD])
    with pytest.raises(RecipeError, match=r'corpus\.roles\.expert: "asistant" is no role'):
        check_recipe(recipe_of(tmp_path, data, roles={"expert": "asistant"}))


def test_samples_that_are_too_long_are_cut_or_excluded(prepared):
    rows = [said(f"u:long|a:{' '.join(map(str, range(90)))}"), GOOD]
    report, _, _ = prepared(rows, max_length=60)
    assert report.numbers["notes"] == {"cut_to_max_length": 1}
    assert report.numbers["truncated"] == 1
    report, _, listed = prepared(rows, max_length=60, on_length="exclude")
    assert report.numbers["reasons"] == {"exceeds_max_length": 1}
    assert listed[0]["detail"].endswith("tokens of at most 60")


def test_loops_in_the_data_are_counted_or_excluded(prepared):
    rows = [said("u:sing|a:" + "over and " * 9), GOOD]
    report, _, _ = prepared(rows)
    assert report.numbers["notes"] == {"loops_keep": 1}
    report, _, _ = prepared(rows, on_loop="exclude")
    assert report.numbers["reasons"] == {"loop": 1}
    report, _, _ = prepared(rows, on_loop="exclude", loop_repeats=40)
    assert report.numbers["reasons"] == {}


def test_the_same_prompt_with_another_answer_is_counted_or_excluded(prepared):
    rows = [said("u:hi|a:one"), said("u:hi|a:two"), said("u:hi|a:one")]
    report, samples, _ = prepared(rows)
    assert report.numbers["notes"] == {"same_prompt_keep": 1}
    assert report.numbers["reasons"] == {"duplicate": 1}
    assert len(samples) == 2
    report, samples, _ = prepared(rows, on_same_prompt="exclude")
    assert report.numbers["reasons"] == {"duplicate": 1, "same_prompt": 1}
    assert [texts(s) for s in samples] == [[f"one{END}"]]


def test_training_rows_that_hold_a_held_out_prompt_are_excluded_by_share(prepared, tmp_path):
    words = [f"w{i}" for i in range(20)]
    bench = write_jsonl(tmp_path / "bench.jsonl", [{"prompt": " ".join(words)}])
    heldout = SourceRecipe(path=str(bench), split="heldout")
    near = said(f"u:please {' '.join(words[:14])} thanks|a:ok")
    report, _, _ = prepared([near, GOOD], heldout)
    assert report.numbers["reasons"] == {}
    assert report.numbers["overlap"]["bench"]["shared_grams"] == 7
    report, _, listed = prepared([near, GOOD], heldout, max_overlap=0.5)
    assert report.numbers["reasons"] == {"overlaps_heldout": 1}
    assert listed[0]["detail"] == "54% of a held-out prompt's 8-grams, at most 50%"
    report, _, _ = prepared([near, GOOD], heldout, max_overlap=0.6)
    assert report.numbers["reasons"] == {}


def test_an_answer_too_short_for_training_costs_itself_where_answers_are_events(prepared):
    rows = [said("u:1|a:2222|u:3|a:4444"), said("u:1|a:2222")]
    tokenizer = byte_chatml(THINKING.replace("<think>\n\n</think>\n\n", "-"))
    report, samples, _ = prepared(rows, tokenizer=tokenizer)
    assert [len(s.messages) for s in samples] == [2, 4]
    assert report.numbers["reasons"] == {"duplicate": 1}
    assert report.numbers["sources"]["rows"]["samples"] == 2
    assert report.numbers["accepted"] == 1
    rows = [said(f"u:1|a:2222|u:{'3' * 40}|a:4444")]
    report, samples, _ = prepared(rows, tokenizer=tokenizer, max_length=50)
    assert [len(s.messages) for s in samples] == [2]
    assert report.numbers["notes"] == {"answers_left_out_prompt_exceeds_max_length": 1}
    assert any("left out: prompt_exceeds_max_length" in line for line in report.lines)


def test_an_event_that_another_row_gave_is_left_out_alone(prepared):
    tokenizer = byte_chatml(THINKING)
    rows = [said("u:1|a:2222"), said("u:1|a:2222|u:3|a:4444")]
    report, samples, _ = prepared(rows, tokenizer=tokenizer)
    assert [len(s.messages) for s in samples] == [2, 4]
    assert report.numbers["accepted"] == 2
    assert report.numbers["notes"] == {"answers_left_out_duplicate": 1}


def test_a_template_from_a_file_is_another_corpus(prepared, tmp_path):
    _, [plain], _ = prepared([GOOD])
    other = tmp_path / "other.jinja"
    other.write_text("Be brief.\n" + byte_chatml().chat_template)
    report, [own], _ = prepared([GOOD], template_file=str(other))
    assert byte_chatml().decode(own.input_ids).startswith("Be brief.")
    assert own.sample_id != plain.sample_id
    assert own.prompt_id == plain.prompt_id
    assert "corpus.template_file" in report.numbers["rendered_by"]


def test_coverage_is_that_of_the_trained_tokens():
    coverage = TokenCoverage()
    for ids in ([0] * 10, [5] * 7, [9] * 7, [12], [15] * 3):
        coverage.add(np.asarray(ids, dtype=np.uint32).tobytes())
    assert coverage.counts().tolist() == [10, 0, 0, 0, 0, 7, 0, 0, 0, 7, 0, 0, 1, 0, 0, 3]
    assert coverage.numbers() == {"tokens": 28, "distinct": 5, "coverage": {"256": 1.0}}
    many = TokenCoverage()
    many.add(np.arange(1000, dtype=np.uint32).tobytes())
    many.add(np.zeros(1000, dtype=np.uint32).tobytes())
    assert many.curve() == {256: (1000 + 256) / 2000, 512: 1512 / 2000, 1024: 1.0}
    assert TokenCoverage().curve() == {}


def test_coverage_in_the_report_counts_training_answers_alone(prepared):
    rows = [said(f"u:question {i}|a:abcabc") for i in range(40)]
    report, samples, _ = prepared(rows, validation_fraction=0.5)
    train = [s for s in samples if s.split == "train"]
    assert 0 < len(train) < 40
    vocabulary = report.numbers["vocabulary"]
    assert vocabulary["tokens"] == sum(s.num_loss_tokens for s in train) == 7 * len(train)
    assert vocabulary["distinct"] == 4
    assert vocabulary["coverage"] == {"256": 1.0}
