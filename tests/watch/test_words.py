"""Words of messages."""

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.watch.words import command_line, counted, ordered, speed_advice, visible


@pytest.mark.parametrize(
    ("count", "noun", "words"),
    [
        (0, "row", "0 rows"),
        (1, "row", "1 row"),
        (1234, "row", "1,234 rows"),
        (1, "process", "1 process"),
        (2, "process", "2 processes"),
    ],
)
def test_a_count_has_its_noun_in_the_right_number(count, noun, words):
    assert counted(count, noun) == words


@given(st.lists(st.text(min_size=1), min_size=1))
def test_a_shell_takes_a_command_apart_into_its_words(words):
    assert shlex.split(command_line(*words)) == words


def test_methods_stand_by_their_budgets():
    names = ["ddtree-64", "other", "ddtree-8", "ddtree-128", "chain", "ddtree-16"]
    assert ordered(names) == [
        "chain", "ddtree-8", "ddtree-16", "ddtree-64", "ddtree-128", "other",
    ]  # fmt: skip


def test_what_makes_a_method_slow_is_told_apart():
    costs = {"ddtree-8": (0.5, 1.2), "chain": (0.6, 0.9), "ddtree-16": (0.7, 0.8), "x": (1.1, 1.3)}
    weak, dear = speed_advice(costs)
    assert weak.startswith("chain, ddtree-16: slower than plain decoding even where")
    assert dear.startswith("ddtree-8: slower than plain decoding because a verification costs")
    assert speed_advice({"x": (1.1, 0.9)}) == []


@given(st.text())
def test_property_no_control_character_reaches_a_terminal(text):
    shown = visible(text)
    assert all(ord(c) >= 32 and not 127 <= ord(c) < 160 for c in shown if c not in "\n\t")
    if shown == text:
        return
    assert visible(shown) == shown


def test_control_characters_are_spelled_out():
    assert visible("a\x1b[31mb\r\n\tü\x9b") == "a\\x1b[31mb\\r\n\tü\\x9b"
