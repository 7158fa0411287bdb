"""Rows that are no conversations: tokens with a mask, and plain text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fixtures_chatml import byte_chatml
from paceline.corpus.answer import answer_sample
from paceline.corpus.mask import Renderer
from paceline.corpus.rows import Accepted, Rejected, RowPreparer
from paceline.recipe.schema import CorpusRecipe

TOKENIZER = byte_chatml()
RENDERER = Renderer.of(TOKENIZER, {})


def prepare(row, *, regenerate=False, heldout=False, **corpus):
    preparer = RowPreparer(RENDERER, CorpusRecipe(**corpus), regenerate)
    return preparer.prepare(row, "test", heldout=heldout)


def sample(row, **options):
    outcome = prepare(row, **options)
    assert isinstance(outcome, Accepted), outcome
    return outcome.sample


def reason(row, **options) -> str:
    outcome = prepare(row, **options)
    assert isinstance(outcome, Rejected), outcome
    return outcome.reason


@settings(max_examples=200, deadline=None)
@given(mask=st.lists(st.sampled_from([0, 1, True, False, 0.0, 1.0]), min_size=1, max_size=40))
def test_property_the_mask_is_kept_as_it_was_given(mask):
    ids = [i % len(TOKENIZER) for i in range(len(mask))]
    outcome = prepare({"input_ids": ids, "loss_mask": mask}, min_loss_tokens=1)
    if not any(mask):
        assert isinstance(outcome, Rejected)
        assert outcome.reason == "too_few_loss_tokens"
        return
    assert isinstance(outcome, Accepted)
    assert outcome.sample.input_ids == ids
    assert outcome.sample.loss_mask().int().tolist() == [int(v) for v in mask]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"input_ids": [1, 2, 3]}, "no_loss_mask"),
        ({"input_ids": [1, 2, 3], "loss_mask": [0, 1]}, "bad_loss_mask"),
        ({"input_ids": [1, 2, 3], "loss_mask": [0, 1, 2]}, "bad_loss_mask"),
        ({"input_ids": [1, 2, 3], "loss_mask": [0, 1, None]}, "bad_loss_mask"),
        ({"input_ids": [1, 2, 3], "loss_mask": [0, 1, "1"]}, "bad_loss_mask"),
        ({"input_ids": [1, 2, 3], "loss_mask": [0, [], 1]}, "bad_loss_mask"),
        ({"input_ids": [1, 2.0, 3], "loss_mask": [0, 1, 1]}, "bad_input_ids"),
        ({"input_ids": [True, 2, 3], "loss_mask": [0, 1, 1]}, "bad_input_ids"),
        ({"input_ids": "123", "loss_mask": [0, 1, 1]}, "bad_input_ids"),
        ({"input_ids": [], "loss_mask": []}, "bad_input_ids"),
        ({"input_ids": [1, 2, len(TOKENIZER)], "loss_mask": [0, 1, 1]}, "token_id_out_of_range"),
        ({"input_ids": [1, -2, 3], "loss_mask": [0, 1, 1]}, "token_id_out_of_range"),
    ],
)
def test_tokens_that_cannot_be_used_are_never_repaired(row, told):
    assert reason(row) == told


def test_tokens_are_cut_and_named_by_what_they_are():
    row = {"input_ids": list(range(10)), "loss_mask": [0] * 4 + [1] * 6}
    whole = sample(row)
    assert (whole.messages, whole.loss_spans) == ([], [(4, 10)])
    assert whole.sample_id == sample(dict(reversed(row.items()))).sample_id
    assert whole.sample_id != sample({**row, "loss_mask": [0] * 5 + [1] * 5}).sample_id
    cut = sample(row, max_length=7)
    assert (cut.input_ids, cut.loss_spans) == (list(range(7)), [(4, 7)])
    assert reason(row, max_length=4) == "prompt_exceeds_max_length"


def test_the_prompt_of_tokens_is_what_stands_before_the_last_answer():
    row = {"input_ids": list(range(10)), "loss_mask": [0, 0, 1, 1, 0, 0, 0, 1, 1, 1]}
    asked = sample(row, regenerate=True)
    assert (asked.input_ids, asked.loss_spans) == (list(range(7)), [])
    assert asked.prompt_id == sample(row).prompt_id
    assert sample(row, heldout=True).input_ids == asked.input_ids
    every = {"input_ids": [1, 2], "loss_mask": [1, 1]}
    assert reason(every, regenerate=True) == "no_user_turn"


def test_the_same_answer_to_other_tokens_is_another_sample():
    rows = [{"input_ids": [7, i, 9], "loss_mask": [0, 0, 1]} for i in (1, 2)]
    asked = [sample(row, regenerate=True) for row in rows]
    ids = TOKENIZER.encode("ok")
    answered = [
        answer_sample(one, ids, "length", TOKENIZER, identity=RENDERER.identity) for one in asked
    ]
    assert answered[0].sample_id != answered[1].sample_id
    assert answered[0].prompt_id != answered[1].prompt_id
    assert answered[0].messages == answered[1].messages
    assert answered[0].input_ids == [7, 1, *ids]


def test_text_is_trained_on_whole_or_is_a_prompt():
    row = {"text": "once upon a time"}
    read = sample(row)
    assert read.input_ids == TOKENIZER.encode("once upon a time")
    assert read.loss_spans == [(1, len(read.input_ids))]
    assert read.messages == []
    asked = sample(row, regenerate=True)
    assert asked.messages == [{"role": "user", "content": "once upon a time"}]
    assert asked.input_ids == RENDERER.prompt(asked.messages, None)
    assert sample(row, heldout=True).input_ids == asked.input_ids
    assert reason({"text": " \n"}) == "empty_text"
    assert reason({"text": "x"}) == "too_few_loss_tokens"


def test_turns_win_over_a_text_beside_them():
    row = {"text": "<s>hi ok", "messages": [{"role": "user", "content": "hi"}]}
    assert sample(row, regenerate=True).messages == row["messages"]


def test_a_completion_is_the_answer_to_its_prompt():
    pair = sample({"prompt": "hi", "completion": "ok"})
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}]
    assert pair.messages == turns
    assert pair.sample_id == sample({"prompt": turns[:1], "completion": turns[1:]}).sample_id
    assert reason({"prompt": "hi", "completion": 3}) == "bad_conversation"


@pytest.mark.parametrize(
    ("part", "told"),
    [
        ({"type": "image_url", "image_url": {"url": "x"}}, "content_image_url"),
        ({"type": "input_audio"}, "content_input_audio"),
        ({"type": "VIDEO", "text": "x"}, "content_video"),
        ({"type": "no kind!", "text": "x"}, "unsupported_content"),
        ({"type": "text"}, "unsupported_content"),
        (3, "unsupported_content"),
    ],
)
def test_parts_that_are_no_text_are_told_by_their_kind(part, told):
    content = [{"type": "text", "text": "look: "}, part]
    assert reason({"messages": [{"role": "user", "content": content}]}, regenerate=True) == told


def test_parts_of_text_are_joined():
    content = [{"type": "text", "text": "a"}, "b", {"type": "input_text", "text": "c"}]
    row = {"messages": [{"role": "user", "content": content}]}
    assert sample(row, regenerate=True).messages == [{"role": "user", "content": "abc"}]
