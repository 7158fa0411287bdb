"""From a server's reply to the ids that the target generated, or the reason why not."""

import re
from dataclasses import dataclass

from paceline.corpus.answer_reasons import NOT_TOKENS, PROMPT_DIFFERS, TOO_FEW, is_fault
from paceline.corpus.groups import Answer
from paceline.corpus.mask import Renderer
from paceline.corpus.served.store import Kept, Refused
from paceline.target.chat import encode
from paceline.target.served.pool import BadReply, WrongPrompt
from paceline.target.served.replies import Reply
from paceline.types import Sample

_UNREADABLE = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Reader:
    """Reads the replies of one run."""

    renderer: Renderer
    ends: frozenset[int]
    """Tokens that end an answer; each counts as generated."""
    vocab_size: int
    renders_there: bool
    """The server renders the messages itself, so its prompt may be another than ours."""

    def read(self, prompt: Sample, limit: int, reply: Reply) -> Kept:
        """What to keep of a reply; an answer has at most `limit` ids, its end token included.

        Raises BadReply for what no answer can be, WrongPrompt where the server has processed
        other ids than those it was sent.
        """
        differs = _difference(prompt, reply)
        if differs and not self.renders_there:
            raise WrongPrompt(
                f"processes another prompt than it was sent: {differs}. Prompts are changed or "
                "cut there"
            )
        ids = None if reply.ids is None else list(reply.ids)
        if ids is not None and any(not 0 <= token < self.vocab_size for token in ids):
            raise BadReply(f"generated ids outside of the target's {self.vocab_size}")
        is_unchecked = reply.prompt_ids is None and reply.prompt_tokens is None
        refusal = self._refusal(reply, differs)
        is_retokenised = False
        if refusal is None and ids is None:
            ids = self._tokenised(reply)
            is_retokenised = ids is not None
            if ids is None:
                refusal = (NOT_TOKENS, f"no token_ids, and the text {reply.text[:80]!r}")
        if refusal is not None:
            reason, detail = refusal
            said = Refused(
                prompt_id=prompt.prompt_id,
                reason=reason,
                detail=detail,
                finish=reply.finish,
                ids=ids or [],
            )
            return Kept(said, is_unchecked=is_unchecked)
        answer = self._answer(prompt, ids or [], reply.finish, limit)
        return Kept(answer, is_retokenised, is_unchecked)

    def fault(self, kept: Kept) -> tuple[str, str]:
        """What is wrong with an answer by the server's making: a word, and words; else empty."""
        said = kept.said
        if isinstance(said, Refused):
            if not is_fault(said.reason):
                return "", ""
            word = "finish" if said.reason.startswith("finish_") else said.reason
            return word, f"{said.reason}, {said.detail}"
        if not self.ends.issuperset(said.ids):
            return "", ""
        return TOO_FEW, f"{TOO_FEW}, an empty text that ended with {said.finish!r}"

    def _refusal(self, reply: Reply, differs: str) -> tuple[str, str] | None:
        if differs:
            return PROMPT_DIFFERS, differs
        if reply.finish not in ("stop", "length"):
            word = re.sub(r"\W+", "_", reply.finish.lower())[:40]
            return f"finish_{word}", f"the server ended it with {reply.finish!r}"
        return None

    def _tokenised(self, reply: Reply) -> list[int] | None:
        """The ids of an answer that came as text; None where they are surely others."""
        tokenizer, text = self.renderer.tokenizer, reply.text
        if not reply.is_all or _UNREADABLE in text:
            return None
        ids = encode(tokenizer, text)
        again = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return ids if again == text else None

    def _answer(self, prompt: Sample, ids: list[int], finish: str, limit: int) -> Answer:
        ended = next((place for place, token in enumerate(ids) if token in self.ends), None)
        if ended is not None:
            # A server that knows fewer end tokens goes on where the target had ended.
            ids, finish = ids[: ended + 1], "stop"
        elif finish == "stop":
            end = self.end_token()
            ids = ids if end is None else [*ids, end]
        if len(ids) > limit:
            ids, finish = ids[:limit], "length"
        if not ids:
            raise BadReply(f"an empty answer that ended with {finish!r}")
        return Answer(prompt.prompt_id, ids, finish)

    def end_token(self) -> int | None:
        """What the template ends an assistant turn with, which some servers leave out."""
        closing = encode(self.renderer.tokenizer, self.renderer.end.closing)
        written = [token for token in closing if token in self.renderer.end.ids]
        return next(iter([*written, *sorted(self.ends)]), None)


def _difference(prompt: Sample, reply: Reply) -> str:
    """Where the prompt that was processed is not ours, in words; empty where it is."""
    ours, theirs = prompt.input_ids, reply.prompt_ids
    if theirs is not None:
        if theirs == ours:
            return ""
        pairs = enumerate(zip(ours, theirs, strict=False))
        at = next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
        return (
            f"{len(theirs)} tokens, ours has {len(ours)}; they part at token {at}: "
            f"{theirs[at : at + 4]} there, {ours[at : at + 4]} here"
        )
    if reply.prompt_tokens is not None and reply.prompt_tokens != len(ours):
        return f"{reply.prompt_tokens} tokens by its count, ours has {len(ours)}"
    return ""
