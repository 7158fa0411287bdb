"""Why answers are left out: whose making each reason is, and what to do about it."""

from collections.abc import Iterable

FAILED = "server_failed"
"""Reason of prompts that were given up: those alone are asked again by the next start."""

REJECTED = "server_rejected"
PROMPT_DIFFERS = "prompt_differs"
NOT_TOKENS = "text_not_tokens"
TOO_FEW = "too_few_loss_tokens"
LOOP = "loop"
CUT = "length_cut"

_OF_THE_PROMPT = frozenset({"finish_tool_calls", "finish_function_call", "finish_content_filter"})
"""Ends of an answer that follow from what was asked."""

_SETTINGS = {
    TOO_FEW: "answers that are empty or shorter than corpus.min_loss_tokens: look at some",
    LOOP: "keep them with regenerate.on_loop=keep, or sample at a temperature above 0; either "
    "with a new run directory",
    CUT: "allow longer answers (regenerate.max_new_tokens), or keep cut ones "
    "(regenerate.on_length=keep); either with a new run directory",
}

_SERVERS = {
    TOO_FEW: "the servers' answers are empty or shorter than corpus.min_loss_tokens: put a prompt "
    "to a server by hand, and look at its template and stop words",
    REJECTED: "the servers refuse them: read their words",
    FAILED: "requests fail over them while others are answered: look at the servers' logs",
    PROMPT_DIFFERS: "the server renders another prompt than the target's template does: serve "
    "that template, or have token ids sent (regenerate.api=completions, with a new run directory)",
    NOT_TOKENS: "the server tells no token_ids, and its text is not what the target's tokenizer "
    "would read back: serve with one that knows return_token_ids",
}


def is_of_server(reason: str) -> bool:
    """Whether a server has given no answer of use, which another or a mended one may give."""
    return reason in _SERVERS or reason.startswith("finish_")


def is_fault(reason: str) -> bool:
    """Whether it is a server's making, and not the prompt's."""
    return reason in (PROMPT_DIFFERS, NOT_TOKENS) or (
        reason.startswith("finish_") and reason not in _OF_THE_PROMPT
    )


def advice(reasons: Iterable[str], *, is_served: bool) -> str:
    """What to do about the reasons, a sentence each; empty for those without any."""
    told: list[str] = []
    for reason in reasons:
        words = (_SERVERS.get(reason) if is_served else None) or _SETTINGS.get(reason)
        if words is None and reason.startswith("finish_"):
            words = "the servers end their answers so: look at their settings"
        if words is not None:
            told.append(f"{reason}: {words}.")
    return " ".join(told)
