"""Random conversations through every template and tokenizer: program and definition agree."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chat_templates import FAMILIES, TOKENIZERS
from golden_chats import ADD
from mask_reference import Reference
from paceline.corpus.end_tokens import turn_end
from paceline.corpus.mask import Renderer
from paceline.rows.rejection import RowRejected
from paceline.target.chat import load_tokenizer

_KEYS = ("reasoning_content", "reasoning", "thinking")
_PIECES = ("ok", "x", "\n", "\n\n", " ", "ö", "🙂", ">", "] ", "assistant", "user\n", "{}")
_TAGS = ("<think>", "</think>", "<think>\n", "\n</think>\n\n", "<tool_response>", "<tool_call>")


def _texts(family):
    pieces = [*_PIECES, *_TAGS, *family.specials]
    plain = st.lists(st.sampled_from(_PIECES), max_size=4)
    return (plain | plain | st.lists(st.sampled_from(pieces), max_size=5)).map("".join)


def _reasoned(family):
    return st.tuples(_texts(family), _texts(family)).map(
        lambda pair: f"<think>\n{pair[0]}\n</think>\n\n{pair[1]}"
    )


def _call(call_id, arguments):
    return {
        "type": "function",
        "id": call_id,
        "function": {"name": "add", "arguments": arguments},
    }


_CALLS = st.sampled_from(
    [
        [_call("abcdefghi", {"a": "ö\n"})],
        [_call("abcdefghi", {})],
        [_call("abcdefghi", {}), _call("abcdefghi", {"a": 1})],
        [_call("1", {})],
    ]
)

_ORDERLY = ("ua", "ua", "ua", "uCta")
_ANY = (*_ORDERLY, "utaa", "a", "u", "t", "C")


@st.composite
def _answers(draw, family, is_call):
    message = {
        "role": "assistant",
        "content": draw(_texts(family) | _texts(family) | _reasoned(family)),
    }
    for key in draw(st.lists(st.sampled_from(_KEYS), max_size=2, unique=True)):
        message[key] = draw(_texts(family))
    if is_call:
        message["tool_calls"] = draw(_CALLS)
    return message


@st.composite
def _conversations(draw, family):
    """Mostly what chats look like, and sometimes anything in any order."""
    texts = _texts(family)
    shapes = draw(st.sampled_from([_ORDERLY, _ORDERLY, _ANY]))
    roles = "".join(draw(st.lists(st.sampled_from(shapes), min_size=1, max_size=3)))
    messages = []
    if draw(st.integers(0, 3)) == 0:
        messages.append({"role": "system", "content": draw(texts)})
    for role in roles if {"a", "C"} & set(roles) else roles + "a":
        if role in "aC":
            messages.append(draw(_answers(family, role == "C")))
        elif role == "u":
            messages.append({"role": "user", "content": draw(texts)})
        else:
            messages.append({"role": "tool", "content": draw(texts), "tool_call_id": "abcdefghi"})
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    trained = draw(st.sampled_from([answers, answers, answers[-1:], answers[:1]]))
    return messages, draw(st.sampled_from([None, None, [ADD]])), trained


def _outcome(renderer, messages, tools, trained):
    try:
        events = renderer.events(messages, tools, trained)
    except RowRejected as error:
        return error.reason
    return [(event.ids, [tuple(span) for span in event.spans], event.end) for event in events]


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("name", [*FAMILIES, "qwen3 off"])
def test_the_program_does_what_the_definition_says(tmp_path_factory, name, kind):
    name, _, off = name.partition(" ")
    family = FAMILIES[name]
    template_args = {"enable_thinking": False} if off else {}
    folder = family.save(tmp_path_factory.mktemp("target"), kind)
    tokenizer = load_tokenizer(str(folder))
    program = Renderer.of(tokenizer, template_args, folder)
    definition = Reference(tokenizer, template_args, turn_end(tokenizer, template_args, folder))

    @settings(max_examples=20, deadline=None)
    @given(conversation=_conversations(family))
    def agree(conversation):
        assert _outcome(program, *conversation) == _outcome(definition, *conversation)

    agree()
