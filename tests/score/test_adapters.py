"""Rows of published data sets, as their files have them."""

import pytest

from paceline.rows.rejection import RowRejected
from paceline.score.adapters import Question, question_of


def asked(row: dict, adapter: str, *, asks: bool = False) -> tuple[str, ...]:
    """All user turns."""
    question = question_of(row, adapter, asks=asks)
    return (*(m["content"] for m in question.messages if m["role"] == "user"), *question.later)


MT_BENCH = {
    "question_id": 81,
    "category": "writing",
    "turns": ["Compose a post.", "Rewrite it."],
    "reference": [],
}


def test_mt_bench_has_two_turns_and_a_category():
    question = question_of(MT_BENCH, "mt_bench", asks=False)
    assert question == Question(
        messages=({"role": "user", "content": "Compose a post."},),
        later=("Rewrite it.",),
        domain="writing",
    )
    hub = {"prompt": MT_BENCH["turns"], "prompt_id": 1, "category": "writing", "reference": []}
    assert question_of(hub, "mt_bench", asks=False) == question, "the copy on the hub"
    assert question_of(MT_BENCH, "prompts", asks=False) == question, "Spec-Bench has the same form"


BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."


@pytest.mark.parametrize(
    ("adapter", "row", "plain", "with_wording"),
    [
        ("gsm8k", {"question": "2+2?", "answer": "#### 4"}, "2+2?", "2+2?" + BOXED),
        (
            "math500",
            {"problem": "x?", "solution": "", "answer": "1", "subject": "Algebra", "level": 2},
            "x?",
            "x?" + BOXED,
        ),
        (
            "humaneval",
            {"task_id": "HumanEval/0", "prompt": "def f():\n", "canonical_solution": ""},
            "def f():\n",
            (
                "Write a solution to the following problem "
                "and make sure that it passes the tests:\n"
                "```python\ndef f():\n\n```"
            ),
        ),
        ("mbpp", {"task_id": 2, "prompt": "Write f.", "test_list": []}, "Write f.", "Write f."),
        ("mbpp", {"task_id": 2, "text": "Write f.", "test_list": []}, "Write f.", "Write f."),
        ("alpaca", {"instruction": "Do.", "input": "", "output": "x"}, "Do.", "Do."),
        (
            "alpaca",
            {"instruction": "Do.", "input": "it", "output": "x"},
            "Do.\n\nInput:\nit",
            "Do.\n\nInput:\nit",
        ),
        ("prompts", {"prompt": "Hi"}, "Hi", "Hi"),
        ("prompts", {"text": "Hi"}, "Hi", "Hi"),
    ],
)
def test_columns_and_wordings(adapter, row, plain, with_wording):
    assert asked(row, adapter) == (plain,)
    assert asked(row, adapter, asks=True) == (with_wording,)


def test_the_subject_of_a_problem_and_the_category_of_a_prompt_are_its_domain():
    row = {"problem": "x?", "subject": "Algebra"}
    assert question_of(row, "math500", asks=False).domain == "Algebra"
    assert question_of({"prompt": "x", "category": "c"}, "prompts", asks=False).domain == "c"
    assert question_of({"prompt": "x", "domain": "d"}, "prompts", asks=False).domain == "d"


def test_a_conversation_is_asked_up_to_its_last_user_turn():
    turns = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
    ]
    question = question_of({"messages": turns}, "prompts", asks=False)
    assert [m["content"] for m in question.messages] == ["s", "a", "b", "c"]
    assert question.later == ()


@pytest.mark.parametrize(
    ("adapter", "row", "words"),
    [
        ("gsm8k", {"problem": "x"}, "no text in `question`; the row has problem"),
        ("gsm8k", {"question": " "}, "no text in `question`"),
        ("humaneval", {}, "the row has no columns"),
        ("mt_bench", {"turns": []}, "`turns` is empty"),
        ("mt_bench", {"turns": ["a", 3]}, "`turns` is not a list of texts"),
        ("mt_bench", {"prompt": "a"}, "`prompt` is not a list of texts"),
        ("alpaca", {"instruction": "a", "input": 3}, "`input` is a int"),
        ("prompts", {"question": "x"}, "no `messages`"),
        ("prompts", {"messages": [{"role": "assistant", "content": "x"}]}, "no prompt to answer"),
    ],
)
def test_what_is_no_row_of_the_data_set_is_refused_in_words(adapter, row, words):
    with pytest.raises(RowRejected, match=words):
        question_of(row, adapter, asks=False)
