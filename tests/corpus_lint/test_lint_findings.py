"""Each finding has data that lead to it, and data that do not."""

import json
from pathlib import Path

import pytest

from fixtures_chatml import CHATML, END, THINKING, byte_chatml, turns
from fixtures_corpus import recipe_of
from lint_data import chats, found, source, titles, tokens_row
from paceline.corpus.lint.findings import findings, is_usable
from paceline.corpus.lint.lint import lint
from paceline.recipe.schema import SourceRecipe

LONG = [{"messages": turns(f"u:{i}|a:{'word ' * 100}")} for i in range(20)]


def test_clean_data_have_nothing_but_notes(tmp_path):
    good = found(tmp_path, chats(20), validation_fraction=0.2)
    assert {f.level for f in good} == {"note"}
    assert is_usable(good)
    assert titles(good) == "Overlap with evaluation prompts is not known"


@pytest.mark.parametrize(
    ("rows", "title"),
    [
        ([], "The files hold no rows"),
        ([b"no json"] * 3, "Nothing can be trained on"),
        ([{"prompt": "bare"}], "Nothing can be trained on"),
        ([{"messages": turns("u:x|a:")}], "Nothing can be trained on"),
        ([tokens_row("a question", [1] * 10)], "The mask of data is all ones"),
        ([tokens_row("an answer ", [0, 0, *[1] * 8])], "No answer ends with an end token"),
        ([*chats(4), *[b"bad"] * 2], "33 % of the rows of data would be left out"),
    ],
)
def test_what_is_serious_makes_data_unusable(tmp_path, rows, title):
    bad = found(tmp_path, rows)
    assert title in titles(bad, "serious")
    assert not is_usable(bad)
    assert all(f.advice for f in bad)


@pytest.mark.parametrize(
    "rows",
    [
        [*chats(5), *[b"bad"] * 2],
        [*chats(10), *chats(10)],
        [tokens_row("a question", [0, *[1] * 9]), *chats(1)],
        [tokens_row(f"q answer{END}", [0, 0, *[1] * 7])],
        [tokens_row("an answer ", [0, 0, *[1] * 8]), *chats(1)],
    ],
)
def test_what_is_not_serious_is_usable(tmp_path, rows):
    assert titles(found(tmp_path, rows), "serious") == ""


def test_a_mask_of_zeros_is_called_so(tmp_path):
    zeros = source(tmp_path, "zeros", [tokens_row("some text", [0] * 9)] * 3)
    good = source(tmp_path, "good", chats(9))
    bad = findings(lint(recipe_of(tmp_path, good, zeros)))
    assert titles(bad, "serious") == (
        "Nothing of zeros can be used: its mask is all zeros, or its answers are empty"
    )


def test_some_masks_of_ones_are_a_warning(tmp_path):
    some = found(tmp_path, [tokens_row("a question", [1] * 10), *chats(3)])
    assert "Some masks of data are all ones" in titles(some, "warning")


@pytest.mark.parametrize(
    ("rows", "settings", "title"),
    [
        (LONG, {"max_length": 100}, "100 % of the samples are cut at 100 tokens"),
        ([{"text": "a text"}, *chats(3)], {}, "1 sample is plain text, trained on as a whole"),
        (
            [tokens_row("an answer", [0, 0, *[1] * 7]), *chats(3)],
            {},
            "25 % of the answers do not end",
        ),
        ([{"messages": turns("u:### Response: hi|a:ok")}], {}, "Turns hold marks of a chat"),
        ([{"messages": turns("u:x|a:\n\nok")}], {}, "100 % of the answers begin with white space"),
        ([{"messages": turns(f"u:{'long ' * 90}|a:ok")}], {}, "Little of the text is trained on"),
        (chats(3) * 2, {}, "50 % of the rows are exact duplicates"),
        ([*chats(40), b"bad"], {}, "2.4 % of the rows of data would be left out"),
        ([{"messages": turns(f"u:x|a:{'round and round ' * 9}")}], {}, "goes round in circles"),
    ],
)
def test_warnings(tmp_path, rows, settings, title):
    assert title in titles(found(tmp_path, rows, **settings), "warning")
    clean = found(tmp_path, chats(20), **settings)
    assert title.split(" of ")[-1] not in titles(clean)


@pytest.mark.parametrize(
    ("rows", "title"),
    [
        ([*chats(60), b"bad"], "1.6 % of the rows of data would be left out"),
        ([*chats(20), chats(1)[0]], "4.8 % of the rows are exact duplicates"),
        ([{"messages": turns("u:x|a:one")}, {"messages": turns("u:x|a:two")}],
         "1 row has a prompt that came before"),
        ([{"messages": turns("u:x|u:y|a:one")}], "two turns of one role, one after"),
        ([{"messages": turns("a:hi|u:y|a:one")}], "an assistant turn at the beginning is read"),
        (chats(3), "No sample fell into the validation split"),
    ],
)  # fmt: skip
def test_notes(tmp_path, rows, title):
    assert title in titles(found(tmp_path, rows), "note")
    assert title not in titles(found(tmp_path, chats(20), validation_fraction=0.3))


def test_overlap_with_evaluation_prompts(tmp_path):
    question = "Why do rivers bend to the left more often than right?"
    held = source(tmp_path, "held", [{"prompt": question}, {"prompt": "What is seven by six?"}])
    evaluation = SourceRecipe(path=str(held), split="heldout")

    def told(name, *prompts):
        rows = [*chats(9), *({"messages": turns(f"u:{p}|a:So it is.")} for p in prompts)]
        recipe = recipe_of(tmp_path, source(tmp_path, name, rows), evaluation)
        return titles(findings(lint(recipe)), "warning")

    assert told("clean") == ""
    assert told("same", question).startswith("1 row has a prompt that is also an evaluation")
    copied = told("copied", f"Please say: {question}")
    assert copied == "50 % of the prompts of held share words with training prompts"


@pytest.mark.parametrize(
    ("template", "args", "title"),
    [
        ("{{ strftime_now('%Y') }}", {}, "The chat template writes today's date"),
        ("{{ date_string or strftime_now('%Y') }}", {}, "The chat template writes today's date"),
        ("{{ date_string or strftime_now('%Y') }}", {"date_string": "1 May"}, None),
        ("{%- if enable_thinking %}{%- endif %}", {}, "has a switch, enable_thinking, that is not"),
        ("{%- if enable_thinking %}{%- endif %}", {"enable_thinking": True}, None),
        ("", {}, None),
    ],
)
def test_templates(tmp_path, template, args, title):
    told = titles(
        found(tmp_path, chats(3), tokenizer=byte_chatml(template + CHATML), template_args=args)
    )
    assert (title or "chat template") in told if title else "chat template" not in told


def test_two_templates_in_one_folder(tmp_path):
    recipe = recipe_of(tmp_path, source(tmp_path, "data", chats(3)))
    config = Path(recipe.target.path) / "tokenizer_config.json"
    settings = json.loads(config.read_text())
    for other, is_told in ((CHATML, False), (THINKING, True)):
        config.write_text(json.dumps({**settings, "chat_template": other}))
        assert ("two chat templates" in titles(findings(lint(recipe)))) is is_told


def test_reasoning_that_the_template_drops(tmp_path):
    def told(name, message):
        rows = [{"messages": [*turns("u:x"), {"role": "assistant", "content": "yes", **message}]}]
        recipe = recipe_of(tmp_path, source(tmp_path, name, rows))
        return titles(findings(lint(recipe)), "warning")

    assert told("lost", {"reasoning_content": "let me see"}) == (
        "The reasoning of 1 answer is lost"
    )
    assert told("none", {}) == ""


@pytest.mark.parametrize("regenerate", [False, True])
def test_tools_that_the_template_drops(tmp_path, regenerate):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    rows = [*chats(2), {"messages": turns("u:hi|a:ok"), "tools": tools}]
    without = CHATML.replace("{%- if tools %}", "{%- if false %}")
    for name, template, said in (
        ("lost", without, "The tools of 1 row are lost"),
        ("shown", CHATML, ""),
    ):
        folder = tmp_path / name
        folder.mkdir()
        data = source(tmp_path, name, rows)
        recipe = recipe_of(folder, data, tokenizer=byte_chatml(template), regenerate=regenerate)
        told = titles(findings(lint(recipe)), "warning")
        assert ("tools" in told) == bool(said)
        assert said in told


def test_prompts_that_will_be_answered(tmp_path):
    rows = [{"prompt": f"Say {i}"} for i in range(4)]
    told = found(tmp_path, rows, regenerate=True, validation_fraction=0.0)
    assert is_usable(told)
    assert "Only prompts were looked at" in titles(told)
    recipe = recipe_of(tmp_path, source(tmp_path, "data", rows))
    by_itself = findings(lint(recipe, may_be_prompts=True))
    assert "No row has an answer, so the prompts were looked at" in titles(by_itself)
    assert is_usable(by_itself)


def test_a_split_with_nothing_to_train_on(tmp_path):
    assert "All samples fell into the validation split" in titles(
        found(tmp_path, chats(3), validation_fraction=0.999), "serious"
    )


def test_answers_that_are_samples_of_their_own(tmp_path):
    thinking = byte_chatml(
        THINKING.replace("{{ m['content'] +", "{{ (m['content'].split('</think>')[-1]) +")
    )
    rows = [{"messages": turns("u:x|a:<think>\nso\n</think>\n\na|u:y|a:ok")}]
    told = found(tmp_path, rows, tokenizer=thinking, template_args={"enable_thinking": False})
    assert "1 answer became samples of their own" in titles(told, "note")


def test_answers_of_accepted_rows_that_are_left_out(tmp_path):
    thinking = byte_chatml(
        THINKING.replace("{{ m['content'] +", "{{ (m['content'].split('</think>')[-1]) +")
    )
    rows = [{"messages": turns(f"u:x|a:<think>\nso\n</think>\n\na|u:{'y' * 300}|a:ok")}]
    settings = {"tokenizer": thinking, "template_args": {"enable_thinking": False}}
    assert "would be left out" not in titles(found(tmp_path, rows, **settings))
    told = found(tmp_path, rows, **settings, max_length=200)
    assert "1 answer of accepted rows would be left out" in titles(told, "warning")
