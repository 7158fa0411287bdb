"""What the mask of each family's template has to be, as text: ⟦ ⟧ is what an engine generated.

A row is a list with one text per event, or the reason for which it is left out.
"""

from typing import Any

from fixtures_chatml import turns

Golden = list[str] | str

ADD = {"type": "function", "function": {"name": "add", "parameters": {}}}


def thought(content: str, reasoning: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "reasoning_content": reasoning, **more}


def call(content: str = "", **more: Any) -> dict[str, Any]:
    function = {"name": "add", "arguments": {"a": 2}}
    calls = [{"type": "function", "id": "abcdefghi", "function": function}]
    return {"role": "assistant", "content": content, "tool_calls": calls, **more}


RESULT = {"role": "tool", "content": "4", "tool_call_id": "abcdefghi"}

CHATS: dict[str, list[dict[str, Any]]] = {
    "one": turns("u:hi|a:ok"),
    "two": turns("u:hi|a:ok|u:more|a:yes"),
    "system": turns("s:be nice|u:hi|a:ok"),
    "spaces": turns("u: hi|a:\n ok \n"),
    "left open": turns("u:hi|a:ok|u:more"),
    "reasoning key": [*turns("u:hi"), thought("ok", "hm")],
    "reasoning inline": turns("u:hi|a:<think>\nhm\n</think>\n\nok"),
    "reasoning twice": [
        *turns("u:hi"),
        thought("ok", "hm"),
        *turns("u:more"),
        thought("yes", "so"),
    ],
    "tool": [*turns("u:hi"), call(), RESULT, *turns("a:ok")],
    "tool and reasoning": [
        *turns("u:hi"),
        call(reasoning_content="hm"),
        RESULT,
        thought("ok", "so"),
    ],
    "tool and inline": [
        *turns("u:hi"),
        call("<think>\nhm\n</think>\n\n"),
        RESULT,
        *turns("a:ok"),
    ],
    "assistant first": turns("a:x|u:hi|a:ok"),
}
"""Every assistant turn is trained, the one before the first question too."""

_LLAMA = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
    "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
)
_LLAMA_HI = (
    "<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
)
_LLAMA_MORE = _LLAMA_HI.replace("hi<", "more<")
_LLAMA_TOOL = (
    _LLAMA.replace("Cutting", "Environment: ipython\nCutting")
    + "<|eot_id|>"
    + _LLAMA_HI.replace(
        "hi<",
        'Functions:\n\n{\n    "type": "function",\n    "function": {\n        "name": "add",\n'
        '        "parameters": {}\n    }\n}\n\nhi<',
    )
    + '⟦{"name": "add", "parameters": {"a": 2}}<|eot_id|>⟧'
    '<|start_header_id|>ipython<|end_header_id|>\n\n"4"<|eot_id|>'
    "<|start_header_id|>assistant<|end_header_id|>\n\n⟦ok<|eot_id|>⟧"
)
_LLAMA_ONE = f"{_LLAMA}<|eot_id|>{_LLAMA_HI}⟦ok<|eot_id|>⟧"

_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>'
_TOOLS = '<tools>\n{"type": "function", "function": {"name": "add", "parameters": {}}}\n</tools>'
_TOOL_RESPONSE = (
    "<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
)
_HI = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
_MORE = "<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
_NO_THOUGHT = "<think>\n\n</think>\n\n"
_QWEN = "<|im_start|>system\nYou are Qwen.<|im_end|>\n"
_SMOL = "<|im_start|>system\nYou are SmolLM.<|im_end|>\n"
_NICE = "<|im_start|>system\nbe nice<|im_end|>\n"


def _chatml(default_system: str) -> dict[str, Golden]:
    one = f"{default_system}{_HI}⟦ok<|im_end|>⟧\n"
    two = f"{one}{_MORE}⟦yes<|im_end|>⟧\n"
    return {
        "one": [one],
        "two": [two],
        "system": [f"{_NICE}{_HI}⟦ok<|im_end|>⟧\n"],
        "spaces": [f"{default_system}{_HI.replace('hi', ' hi')}⟦\n ok \n<|im_end|>⟧\n"],
        "left open": [f"{one}<|im_start|>user\nmore<|im_end|>\n"],
        "reasoning key": [one],
        "reasoning inline": [one.replace("⟦", "⟦<think>\nhm\n</think>\n\n")],
        "reasoning twice": [two],
    }


_GEMMA_HI = "<start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n"
_GEMMA_ONE = f"<bos>{_GEMMA_HI}⟦ok<end_of_turn>⟧\n"
_GEMMA_TWO = (
    f"{_GEMMA_ONE}<start_of_turn>user\nmore<end_of_turn>\n"
    "<start_of_turn>model\n⟦yes<end_of_turn>⟧\n"
)

_MISTRAL_TOOL = (
    '<s>[AVAILABLE_TOOLS] [{"type": "function", "function": {"name": "add", "parameters": {}}}]'
    "[/AVAILABLE_TOOLS][INST] hi[/INST]"
    '⟦[TOOL_CALLS] [{"name": "add", "arguments": {"a": 2}, "id": "abcdefghi"}]</s>⟧'
    '[TOOL_RESULTS] {"content": 4, "call_id": "abcdefghi"}[/TOOL_RESULTS]⟦ ok</s>⟧'
)

_R1 = "<｜begin▁of▁sentence｜>"
_R1_HI = "<｜User｜>hi<｜Assistant｜>"
_R1_OK = f"{_R1}{_R1_HI}⟦ok<｜end▁of▁sentence｜>⟧"
_R1_ONE = f"{_R1}{_R1_HI}<think>\n⟦hm\n</think>\n\nok<｜end▁of▁sentence｜>⟧"

_OSS = "<|start|>system<|message|>Current date: 2025-08-05<|end|>"
_OSS_HI = "<|start|>user<|message|>hi<|end|><|start|>assistant"
_OSS_MORE = "<|start|>user<|message|>more<|end|><|start|>assistant"
_OSS_FINAL = "<|channel|>final<|message|>"
_OSS_HM = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
_OSS_SO = "<|channel|>analysis<|message|>so<|end|><|start|>assistant"
_OSS_TOOLS = (
    "<|start|>developer<|message|># Tools\n\n"
    '[{"type": "function", "function": {"name": "add", "parameters": {}}}]<|end|>'
)
_OSS_CALL = ' to=functions.add<|channel|>commentary json<|message|>{"a": 2}<|call|>'
_OSS_RESULT = (
    '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"4"<|end|>'
    "<|start|>assistant"
)

GOLDENS: dict[str, dict[str, Golden]] = {
    "llama31": {
        "one": [_LLAMA_ONE],
        "two": [f"{_LLAMA_ONE}{_LLAMA_MORE}⟦yes<|eot_id|>⟧"],
        "system": [f"{_LLAMA}be nice<|eot_id|>{_LLAMA_HI}⟦ok<|eot_id|>⟧"],
        "spaces": [_LLAMA_ONE],
        "left open": [_LLAMA_ONE + "<|start_header_id|>user<|end_header_id|>\n\nmore<|eot_id|>"],
        "reasoning key": [_LLAMA_ONE],
        "reasoning inline": [_LLAMA_ONE.replace("⟦", "⟦<think>\nhm\n</think>\n\n")],
        "reasoning twice": [f"{_LLAMA_ONE}{_LLAMA_MORE}⟦yes<|eot_id|>⟧"],
        "tool": [_LLAMA_TOOL],
        "tool and reasoning": [_LLAMA_TOOL],
        "tool and inline": [_LLAMA_TOOL],
        "assistant first": "template_rejected",
    },
    "qwen25": {
        **_chatml(_QWEN),
        "tool": [
            (
                f"<|im_start|>system\nYou are Qwen.\n\n{_TOOLS}<|im_end|>\n{_HI}⟦{_CALL}⟧\n"
                f"{_TOOL_RESPONSE}⟦ok<|im_end|>⟧\n"
            )
        ],
        "assistant first": "template_rejected",
    },
    "qwen3": {
        "one": [f"{_HI}⟦{_NO_THOUGHT}ok<|im_end|>⟧\n"],
        "two": [
            f"{_HI}⟦{_NO_THOUGHT}ok<|im_end|>⟧\n",
            f"{_HI}ok<|im_end|>\n{_MORE}⟦{_NO_THOUGHT}yes<|im_end|>⟧\n",
        ],
        "system": [f"{_NICE}{_HI}⟦{_NO_THOUGHT}ok<|im_end|>⟧\n"],
        "spaces": [f"{_HI.replace('hi', ' hi')}⟦{_NO_THOUGHT} ok \n<|im_end|>⟧\n"],
        "left open": [f"{_HI}⟦{_NO_THOUGHT}ok<|im_end|>⟧\n"],
        "reasoning key": [f"{_HI}⟦<think>\nhm\n</think>\n\nok<|im_end|>⟧\n"],
        "reasoning inline": [f"{_HI}⟦<think>\nhm\n</think>\n\nok<|im_end|>⟧\n"],
        "reasoning twice": [
            f"{_HI}⟦<think>\nhm\n</think>\n\nok<|im_end|>⟧\n",
            f"{_HI}ok<|im_end|>\n{_MORE}⟦<think>\nso\n</think>\n\nyes<|im_end|>⟧\n",
        ],
        "tool": [
            f"<|im_start|>system\n{_TOOLS}<|im_end|>\n{_HI}⟦{_NO_THOUGHT}{_CALL}⟧\n",
            (
                f"<|im_start|>system\n{_TOOLS}<|im_end|>\n{_HI}{_CALL}\n"
                f"{_TOOL_RESPONSE}⟦{_NO_THOUGHT}ok<|im_end|>⟧\n"
            ),
        ],
        "tool and reasoning": [
            (
                f"<|im_start|>system\n{_TOOLS}<|im_end|>\n{_HI}⟦<think>\nhm\n</think>\n\n{_CALL}⟧\n"
                f"{_TOOL_RESPONSE}⟦<think>\nso\n</think>\n\nok<|im_end|>⟧\n"
            )
        ],
        "assistant first": "template_rejected",
    },
    "qwen3 off": {
        "one": [f"{_HI}{_NO_THOUGHT}⟦ok<|im_end|>⟧\n"],
        "two": [
            f"{_HI}{_NO_THOUGHT}⟦ok<|im_end|>⟧\n",
            f"{_HI}ok<|im_end|>\n{_MORE}{_NO_THOUGHT}⟦yes<|im_end|>⟧\n",
        ],
        "system": [f"{_NICE}{_HI}{_NO_THOUGHT}⟦ok<|im_end|>⟧\n"],
        "left open": [f"{_HI}{_NO_THOUGHT}⟦ok<|im_end|>⟧\n"],
        "reasoning key": "answer_not_from_prompt",
        "reasoning inline": "answer_not_from_prompt",
        "tool": [
            f"<|im_start|>system\n{_TOOLS}<|im_end|>\n{_HI}{_NO_THOUGHT}⟦{_CALL}⟧\n",
            (
                f"<|im_start|>system\n{_TOOLS}<|im_end|>\n{_HI}{_CALL}\n"
                f"{_TOOL_RESPONSE}{_NO_THOUGHT}⟦ok<|im_end|>⟧\n"
            ),
        ],
        "assistant first": "template_rejected",
    },
    "gemma": {
        "one": [_GEMMA_ONE],
        "two": [_GEMMA_TWO],
        "system": [_GEMMA_ONE.replace("hi", "be nice\n\nhi")],
        "spaces": [_GEMMA_ONE],
        "left open": [_GEMMA_ONE + "<start_of_turn>user\nmore<end_of_turn>\n"],
        "reasoning key": [_GEMMA_ONE],
        "reasoning inline": [_GEMMA_ONE.replace("⟦", "⟦<think>\nhm\n</think>\n\n")],
        "reasoning twice": [_GEMMA_TWO],
        "tool": "tool_calls_not_rendered",
        "assistant first": "template_rejected",
    },
    "mistral": {
        "one": ["<s>[INST] hi[/INST]⟦ ok</s>⟧"],
        "two": ["<s>[INST] hi[/INST]⟦ ok</s>⟧[INST] more[/INST]⟦ yes</s>⟧"],
        "system": ["<s>[INST] be nice\n\nhi[/INST]⟦ ok</s>⟧"],
        "spaces": ["<s>[INST]  hi[/INST]⟦ ok</s>⟧"],
        "left open": ["<s>[INST] hi[/INST]⟦ ok</s>⟧[INST] more[/INST]"],
        "reasoning key": ["<s>[INST] hi[/INST]⟦ ok</s>⟧"],
        "reasoning inline": ["<s>[INST] hi[/INST]⟦ <think>\nhm\n</think>\n\nok</s>⟧"],
        "tool": [_MISTRAL_TOOL],
        "tool and reasoning": [_MISTRAL_TOOL],
        "tool and inline": [_MISTRAL_TOOL],
        "assistant first": "template_rejected",
    },
    "deepseek_r1": {
        "one": "answer_not_from_prompt",
        "two": "answer_not_from_prompt",
        "system": "answer_not_from_prompt",
        "reasoning key": [_R1_ONE],
        "reasoning inline": [_R1_ONE],
        "reasoning twice": [
            _R1_ONE,
            (
                f"{_R1}{_R1_HI}ok<｜end▁of▁sentence｜><｜User｜>more<｜Assistant｜><think>\n"
                "⟦so\n</think>\n\nyes<｜end▁of▁sentence｜>⟧"
            ),
        ],
        "tool": "template_rejected",
        "assistant first": "answer_not_from_prompt",
    },
    "deepseek_r1_first": {
        "one": [_R1_OK],
        "two": [f"{_R1_OK}<｜User｜>more<｜Assistant｜>⟦yes<｜end▁of▁sentence｜>⟧"],
        "system": [_R1_OK.replace("<｜User｜>", "be nice<｜User｜>")],
        "spaces": [_R1_OK.replace("hi", " hi").replace("ok", "\n ok \n")],
        "left open": [f"{_R1_OK}<｜User｜>more"],
        "reasoning key": [_R1_OK],
        "reasoning inline": [_R1_OK.replace("⟦", "⟦<think>\nhm\n</think>\n\n")],
        "tool": "template_rejected",
        "assistant first": [
            f"{_R1}<｜Assistant｜>⟦x<｜end▁of▁sentence｜>⟧{_R1_HI}⟦ok<｜end▁of▁sentence｜>⟧"
        ],
    },
    "gpt_oss": {
        "one": [f"{_OSS}{_OSS_HI}⟦{_OSS_FINAL}ok<|return|>⟧"],
        "two": [
            f"{_OSS}{_OSS_HI}⟦{_OSS_FINAL}ok<|return|>⟧",
            f"{_OSS}{_OSS_HI}{_OSS_FINAL}ok<|end|>{_OSS_MORE}⟦{_OSS_FINAL}yes<|return|>⟧",
        ],
        "system": [
            (
                f"{_OSS}<|start|>developer<|message|># Instructions\n\nbe nice\n\n<|end|>"
                f"{_OSS_HI}⟦{_OSS_FINAL}ok<|return|>⟧"
            )
        ],
        "left open": [f"{_OSS}{_OSS_HI}⟦{_OSS_FINAL}ok<|return|>⟧"],
        "reasoning key": [f"{_OSS}{_OSS_HI}⟦{_OSS_HM}{_OSS_FINAL}ok<|return|>⟧"],
        "reasoning inline": [f"{_OSS}{_OSS_HI}⟦{_OSS_FINAL}<think>\nhm\n</think>\n\nok<|return|>⟧"],
        "reasoning twice": [
            f"{_OSS}{_OSS_HI}⟦{_OSS_HM}{_OSS_FINAL}ok<|return|>⟧",
            f"{_OSS}{_OSS_HI}{_OSS_FINAL}ok<|end|>{_OSS_MORE}⟦{_OSS_SO}{_OSS_FINAL}yes<|return|>⟧",
        ],
        "tool": [
            f"{_OSS}{_OSS_TOOLS}{_OSS_HI}⟦{_OSS_CALL}⟧{_OSS_RESULT}⟦{_OSS_FINAL}ok<|return|>⟧"
        ],
        "tool and reasoning": [
            (
                f"{_OSS}{_OSS_TOOLS}{_OSS_HI}⟦{_OSS_HM}{_OSS_CALL}⟧{_OSS_RESULT}"
                f"⟦{_OSS_SO}{_OSS_FINAL}ok<|return|>⟧"
            )
        ],
        "assistant first": "template_rejected",
    },
    "smollm2": {
        **_chatml(_SMOL),
        "tool": "tool_calls_not_rendered",
        "assistant first": "answer_not_from_prompt",
    },
    "unmarked": {
        "one": ["user: hi\n\nassistant: ⟦ok⟧\n\n"],
        "two": ["user: hi\n\nassistant: ⟦ok⟧\n\nuser: more\n\nassistant: ⟦yes⟧\n\n"],
        "spaces": ["user:  hi\n\nassistant: ⟦\n ok \n⟧\n\n"],
        "left open": ["user: hi\n\nassistant: ⟦ok⟧\n\nuser: more\n\n"],
        "assistant first": ["assistant: ⟦x⟧\n\nuser: hi\n\nassistant: ⟦ok⟧\n\n"],
    },
}

POSITIONS: dict[tuple[str, str], tuple[int, list[list[int]]]] = {
    ("llama31", "tagged"): (98, [[95, 98]]),
    ("qwen25", "tagged"): (48, [[44, 47]]),
    ("qwen3", "tagged"): (29, [[21, 28]]),
    ("qwen3", "merging"): (40, [[21, 39]]),
    ("qwen3", "characters"): (44, [[21, 43]]),
    ("gemma", "tagged"): (22, [[18, 21]]),
    ("gemma", "characters"): (22, [[18, 21]]),
    ("mistral", "tagged"): (8, [[6, 8]]),
    ("mistral", "characters"): (10, [[6, 10]]),
    ("gpt_oss", "tagged"): (62, [[52, 62]]),
    ("smollm2", "tagged"): (50, [[46, 49]]),
    ("unmarked", "tagged"): (23, [[20, 22]]),
    ("unmarked", "characters"): (25, [[21, 23]]),
}
"""Of the chat `one`, counted by hand: tokens, and where the generated ones are."""
