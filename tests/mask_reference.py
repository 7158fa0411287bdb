"""The loss mask by its definition, slow and plain, for comparison with `paceline.corpus.mask`.

Of the tokenizer it uses `apply_chat_template`, `encode` and `decode`; of Paceline what ends a turn
and the error for rows that are left out.

1. What an engine generated for a turn is what its rendering adds to its prompt, up to and including
   the first end token. All else is context.
2. The prompt's ids stand as they are; what was generated has ids of its own.
3. Where the prompt opened a thought that the rendering leaves out, an engine went on with the
   reasoning, `</think>` and the content; where it opened none and the rendering leaves out the one
   in the content, an engine wrote the content. Calls are in neither, so they are left alone.
   Where the rendering shows what came before the last turn differently, the answer is what it shows
   behind that turn's text. A call whose name is nowhere in what was generated was left out.
4. Turns share one event as long as the next one's prompt begins with the text so far.
5. An event that is closed renders its last turn to the end; the last event goes on to the end of
   the conversation where that begins with the text so far.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jinja2

from paceline.corpus.end_tokens import TurnEnd
from paceline.rows.rejection import RowRejected, TemplateRejected

Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]] | None

_OPEN_THOUGHT = re.compile(r"<think>(\s*)\Z")


@dataclass(frozen=True)
class Expected:
    """Field by field what `paceline.corpus.mask.Event` has to be."""

    ids: list[int]
    spans: list[tuple[int, int]]
    end: int


@dataclass
class _Growing:
    """An event as it is put together: ids stand for text, and `rest` is written after it."""

    ids: list[int]
    text: str
    rest: str
    spans: list[tuple[int, int]]
    end: int


@dataclass(frozen=True)
class Reference:
    """The definition for one tokenizer and one set of template arguments."""

    tokenizer: Any
    template_args: dict[str, Any]
    end: TurnEnd

    def events(self, messages: Messages, tools: Tools, trained: Sequence[int]) -> list[Expected]:
        """Raises RowRejected, TemplateRejected among them."""
        done: list[_Growing] = []
        for turn in trained:
            prompt = self._render(messages[:turn], tools, True)
            generated, rest = self._generated(messages, tools, turn, prompt)
            if done and prompt.startswith(done[-1].text):
                event = done[-1]
                event.ids = self._longer(event.ids, event.text, prompt)
            else:
                event = _Growing(self._encode(prompt), prompt, "", [], 0)
                done.append(event)
            before = len(event.ids)
            event.ids = self._longer(event.ids, prompt, prompt + generated)
            if len(event.ids) > before:
                event.spans.append((before, len(event.ids)))
            event.text, event.rest, event.end = prompt + generated, rest, turn + 1
        whole = self._render(messages, tools, False)
        if done and whole.startswith(done[-1].text):
            done[-1].rest = whole[len(done[-1].text) :]
            done[-1].end = len(messages)
        return [
            Expected(self._longer(e.ids, e.text, e.text + e.rest), e.spans, e.end) for e in done
        ]

    def _generated(
        self, messages: Messages, tools: Tools, turn: int, prompt: str
    ) -> tuple[str, str]:
        """What an engine added to the prompt, and what the template writes after that."""
        whole = self._render(messages[: turn + 1], tools, False)
        message = messages[turn]
        thought = _thought_and_answer(message, prompt)
        if not whole.startswith(prompt):
            added = None if thought is None else thought + self.end.closing
            if added is None:
                unasked = self._render(messages[:turn], tools, False)
                added = _behind(messages, turn, prompt, whole, unasked)
        elif _is_left_out(message, whole.removeprefix(prompt)):
            added = message["content"] + self.end.closing
        else:
            added = whole.removeprefix(prompt)
        for call in message.get("tool_calls", ()):
            if call["function"]["name"] not in added:
                raise RowRejected("tool_calls_not_rendered", f"turn {turn}")
        ends = [str(self.tokenizer.convert_ids_to_tokens(i)) for i in self.end.ids]
        found = list(re.finditer("|".join(map(re.escape, ends)), added)) if ends else []
        if len(found) > max(1, self.end.in_closing):
            raise RowRejected("end_token_in_answer", f"turn {turn}")
        at = found[0].end() if found else len(added.removesuffix(self.end.closing))
        return added[:at], added[at:]

    def _longer(self, ids: list[int], text: str, longer: str) -> list[int]:
        """Ids of `longer`, which begins with `text`, whose ids stand."""
        whole = self._encode(longer)
        if whole[: len(ids)] == ids:
            return whole
        apart = ids + self._encode(longer[len(text) :])
        if self._decode(apart) != self._decode(whole):
            raise RowRejected("template_not_prefix_stable", f"no ids for {longer[len(text) :]!r}")
        return apart

    def _render(self, messages: Messages, tools: Tools, generation_prompt: bool) -> str:
        try:
            [text] = self.tokenizer.apply_chat_template(
                [messages],
                tools=tools,
                add_generation_prompt=generation_prompt,
                tokenize=False,
                **self.template_args,
            )
        except (jinja2.TemplateError, LookupError, TypeError, ValueError) as error:
            raise TemplateRejected(str(error)) from error
        return text

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )


def _is_left_out(message: dict[str, Any], added: str) -> bool:
    thought, closed, _ = message["content"].partition("</think>")
    is_shown = thought.rpartition("<think>")[2].strip() in added
    return bool(closed) and not is_shown and not message.get("tool_calls")


def _thought_and_answer(message: dict[str, Any], prompt: str) -> str | None:
    opened = _OPEN_THOUGHT.search(prompt)
    content = message["content"]
    keys = ("reasoning_content", "reasoning", "thinking")
    reasoning = next((message[key] for key in keys if message.get(key, "").strip()), None)
    if "</think>" in content:
        answer = content
    elif reasoning is not None:
        answer = reasoning.strip("\n") + "\n</think>\n\n" + content
    else:
        answer = None
    if opened is None or answer is None or message.get("tool_calls"):
        return None
    return answer.removeprefix("<think>").removeprefix(opened[1])


def _behind(messages: Messages, turn: int, prompt: str, whole: str, unasked: str) -> str:
    asked = messages[turn - 1]["content"].strip() if turn else ""
    start = prompt.rfind(asked, 0, len(unasked)) if prompt.startswith(unasked) else -1
    place = whole.rfind(prompt[start:]) if asked and start >= 0 else -1
    added = whole[place + len(prompt) - start :]
    if place < 0 or messages[turn]["content"].strip() not in added:
        raise RowRejected("answer_not_from_prompt", f"{prompt[-40:]!r} does not begin the turn")
    return added
