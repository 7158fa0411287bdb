"""Masks that were written down by hand, against the definition and against the program."""

from typing import Any

import pytest

from chat_templates import FAMILIES, TOKENIZERS
from fixtures_chatml import turns
from golden_chats import ADD, CHATS, GOLDENS, POSITIONS, thought
from mask_reference import Reference
from paceline.corpus.end_tokens import turn_end
from paceline.corpus.mask import Renderer
from paceline.rows.rejection import RowRejected
from paceline.target.chat import load_tokenizer

RENDERERS = {"definition": Reference, "program": Renderer}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("families")
    return {
        (family.name, kind): family.save(root / f"{family.name}-{kind}", kind)
        for family in FAMILIES.values()
        for kind in TOKENIZERS
    }


def masker(which: str, folder, template_args: dict[str, Any]):
    tokenizer = load_tokenizer(str(folder))
    if which == "program":
        return Renderer.of(tokenizer, template_args, folder)
    return Reference(tokenizer, template_args, turn_end(tokenizer, template_args, folder))


def marked(tokenizer, event) -> str:
    """The event's text with what was generated in ⟦ ⟧."""
    text, at = "", 0
    for start, end in event.spans:
        text += tokenizer.decode(event.ids[at:start])
        text += "⟦" + tokenizer.decode(event.ids[start:end]) + "⟧"
        at = end
    return text + tokenizer.decode(event.ids[at:])


def mask_of(renderer, messages, tools=None, trained=None):
    """One marked text per event, or the reason for none."""
    if trained is None:
        trained = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    try:
        events = renderer.events(messages, tools, trained)
    except RowRejected as error:
        return error.reason
    return [marked(renderer.tokenizer, event) for event in events]


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize(
    ("family", "chat"), [(family, chat) for family, chats in GOLDENS.items() for chat in chats]
)
@pytest.mark.parametrize("which", RENDERERS)
def test_golden(folders, which, family, chat, kind):
    name, _, off = family.partition(" ")
    renderer = masker(which, folders[name, kind], {"enable_thinking": False} if off else {})
    tools = [ADD] if chat.startswith("tool") else None
    assert mask_of(renderer, CHATS[chat], tools) == GOLDENS[family][chat]


@pytest.mark.parametrize(("family", "kind"), POSITIONS)
@pytest.mark.parametrize("which", RENDERERS)
def test_positions(folders, which, family, kind):
    renderer = masker(which, folders[family, kind], {})
    [event] = renderer.events(CHATS["one"], None, [1])
    count, spans = POSITIONS[family, kind]
    assert (len(event.ids), [list(span) for span in event.spans], event.end) == (count, spans, 2)


@pytest.mark.parametrize("which", RENDERERS)
def test_an_event_ends_where_its_turns_do(folders, which):
    def ends(family, messages, trained, **template_args):
        renderer = masker(which, folders[family, "tagged"], template_args)
        return [event.end for event in renderer.events(messages, None, trained)]

    two = CHATS["two"]
    assert ends("gemma", two, [1, 3]) == [4]
    assert ends("gemma", two, [1]) == [4]
    assert ends("gemma", two, [3]) == [4]
    assert ends("gemma", [*two, *turns("u:left open")], [1, 3]) == [5]
    assert ends("qwen3", two, [1, 3]) == [2, 4]
    assert ends("qwen3", two, [1]) == [2]
    assert ends("qwen3", [*two, *turns("u:left open")], [3]) == [4]
    assert ends("gpt_oss", CHATS["reasoning twice"], [1, 3]) == [2, 4]
    assert ends("deepseek_r1", CHATS["reasoning twice"], [1, 3]) == [2, 4]


@pytest.mark.parametrize("which", RENDERERS)
@pytest.mark.parametrize(
    ("family", "context"),
    [
        ("llama31", "<|start_header_id|>assistant<|end_header_id|>\n\nx<|eot_id|>"),
        ("qwen25", "<|im_start|>assistant\nx<|im_end|>\n"),
        ("qwen3", "<|im_start|>assistant\nx<|im_end|>\n"),
        ("gpt_oss", "<|start|>assistant<|channel|>final<|message|>x<|end|>"),
        ("smollm2", "<|im_start|>assistant\nx<|im_end|>\n"),
        ("gemma", None),
        ("mistral", None),
    ],
)
def test_t_04_a_first_assistant_turn_as_context(folders, which, family, context):
    renderer = masker(which, folders[family, "tagged"], {})
    found = mask_of(renderer, CHATS["assistant first"], trained=[2])
    if context is None:
        assert found == "template_rejected"
        return
    [text] = found
    before, _, generated = text.partition("⟦")
    assert context in before
    assert generated.startswith(
        ("ok", "<think>\n\n</think>\n\nok", "<|channel|>final<|message|>ok")
    )


@pytest.mark.parametrize("which", RENDERERS)
@pytest.mark.parametrize(
    ("turn", "generated"),
    [
        (turns("a:<think>hm</think>ok")[0], "hm</think>ok"),
        (turns("a:<think>\n\nhm\n</think>ok")[0], "\nhm\n</think>ok"),
        (turns("a:hm\n</think>\n\nok")[0], "hm\n</think>\n\nok"),
        (thought("ok", "\n\nhm\n"), "hm\n</think>\n\nok"),
        (thought("", "hm"), "hm\n</think>\n\n"),
        (thought("<think>a</think>ok", "hm"), "a</think>ok"),
    ],
)
def test_r1_goes_on_with_the_thought_that_the_prompt_opened(folders, which, turn, generated):
    renderer = masker(which, folders["deepseek_r1", "tagged"], {})
    expected = (
        "<｜begin▁of▁sentence｜><｜User｜>hi<｜Assistant｜><think>\n"
        f"⟦{generated}<｜end▁of▁sentence｜>⟧"
    )
    assert mask_of(renderer, [*turns("u:hi"), turn]) == [expected]


@pytest.mark.parametrize("which", RENDERERS)
def test_r1_needs_a_thought_in_the_trained_turns_alone(folders, which):
    renderer = masker(which, folders["deepseek_r1", "tagged"], {})
    messages = [*turns("u:hi|a:ok|u:more"), thought("yes", "so")]
    assert mask_of(renderer, messages) == "answer_not_from_prompt"
    assert mask_of(renderer, messages, trained=[3]) == [
        (
            "<｜begin▁of▁sentence｜><｜User｜>hi<｜Assistant｜>ok<｜end▁of▁sentence｜>"
            "<｜User｜>more<｜Assistant｜><think>\n⟦so\n</think>\n\nyes<｜end▁of▁sentence｜>⟧"
        )
    ]


@pytest.mark.parametrize("which", RENDERERS)
def test_mistral_moves_its_tools_to_the_last_question(folders, which):
    renderer = masker(which, folders["mistral", "tagged"], {})
    tools = "[AVAILABLE_TOOLS] " + '[{"type": "function"}]' + "[/AVAILABLE_TOOLS]"
    assert mask_of(renderer, CHATS["two"], [{"type": "function"}]) == [
        f"<s>{tools}[INST] hi[/INST]⟦ ok</s>⟧",
        f"<s>[INST] hi[/INST] ok</s>{tools}[INST] more[/INST]⟦ yes</s>⟧",
    ]


@pytest.mark.parametrize("which", RENDERERS)
@pytest.mark.parametrize(
    ("family", "end"), [("llama31", "<|end_of_text|>"), ("gpt_oss", "<|call|>"), ("gemma", "<eos>")]
)
def test_an_answer_with_any_of_the_end_tokens_in_it_is_refused(folders, which, family, end):
    renderer = masker(which, folders[family, "tagged"], {})
    inside = [*turns("u:hi"), {"role": "assistant", "content": f"ok{end}more"}]
    assert mask_of(renderer, inside) == "end_token_in_answer"
    asked = [{"role": "user", "content": f"hi {end}x"}, *turns("a:ok")]
    [text] = mask_of(renderer, asked)
    assert f"hi {end}x" in text.partition("⟦")[0]
