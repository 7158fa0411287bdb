"""Findings about what is trained on: masks, ends of answers, reasoning."""

from collections.abc import Iterator

from paceline.corpus.lint.lint import Lint, trained_samples
from paceline.corpus.lint.reasons import words_of
from paceline.corpus.lint.wording import Finding, are, have, percent, some
from paceline.watch.words import counted

_LITTLE = 0.1
"""Share of a source's tokens that is trained on, below which it is worth a look."""

_SOME = 0.02
_BLANK_STARTS = 0.2
"""Share of answers that may begin with white space alone."""

_LEFT_OUT = "answers_left_out_"


def mask_findings(result: Lint) -> Iterator[Finding]:
    """Those of data with answers; none where the target will answer."""
    if result.prompts_only or not trained_samples(result):
        return
    yield from _everything(result)
    yield from _little(result)
    yield from _ends(result)
    yield from _starts(result)
    yield from _reasoning(result)
    yield from _answers(result)


def _everything(result: Lint) -> Iterator[Finding]:
    texts: dict[str, int] = {}
    for name, source in result.measure.sources.items():
        turned = sum(n for s, n in _trained_splits(result, name)) - source.texts
        if source.texts:
            texts[name] = source.texts
        if not source.all_trained:
            continue
        is_whole = source.all_trained == turned
        yield Finding(
            "serious" if is_whole else "warning",
            f"The mask of {name} is all ones" if is_whole else f"Some masks of {name} are all ones",
            f"In {source.all_trained:,} of {counted(turned, 'sample')} every token is trained on, "
            "the prompt too: prompts and answers are not told apart, and the drafter would learn "
            "to write the user's questions.",
            "Mend `loss_mask` (1 for what the target wrote, 0 for the rest), or give the "
            "conversations as `messages`.",
            "samples",
        )
    if texts:
        count = sum(texts.values())
        yield Finding(
            "warning",
            f"{are(count, 'sample')} plain text, trained on as a whole",
            f"Rows of {some(texts)} have `text` and no turns (or tokens with a mask of ones after "
            "the first), so nothing tells what the target would have written.",
            "Nothing, if the target is used to go on with texts. For chats, give `messages`.",
            "sources",
        )


def _trained_splits(result: Lint, name: str) -> Iterator[tuple[str, int]]:
    for split, amount in result.measure.sources[name].splits.items():
        if split != "heldout":
            yield split, amount.samples


def _little(result: Lint) -> Iterator[Finding]:
    low = {
        name: source.amount.share
        for name, source in result.measure.sources.items()
        if name not in result.heldout and source.amount.share < _LITTLE
    }
    if low:
        listed = some(f"{name} ({percent(part, 1)})" for name, part in low.items())
        yield Finding(
            "warning",
            "Little of the text is trained on",
            f"Of {listed} less than a tenth of the tokens was written by an assistant. All tokens "
            "cost the same to read, and the drafter learns from those few.",
            "Look at the samples called “least trained”: long prompts are fine, if the server has "
            "them too; a mask that misses answers is not.",
            "samples",
        )


def _ends(result: Lint) -> Iterator[Finding]:
    measure = result.measure
    whole = measure.ended + measure.unended
    if not measure.unended:
        return
    ends = " or ".join(f"`{end}`" for end in result.template.ends)
    if not measure.ended:
        yield Finding(
            "serious",
            "No answer ends with an end token",
            f"None of {counted(whole, 'answer')} that is there to its end closes with {ends}: "
            "the drafter would never learn where answers end.",
            "Look at the chat template: it has to close assistant turns with the token that the "
            "engine stops at. In rows of tokens, the mask has to reach over it.",
            "template",
        )
    elif measure.unended / whole >= 0.001:
        yield Finding(
            "warning",
            f"{percent(measure.unended, whole)} of the answers do not end with an end token",
            f"{measure.unended:,} of {counted(whole, 'answer')} without {ends}.",
            "In rows of tokens, the mask has to reach over the end token; otherwise look at the "
            "chat template.",
            "answers",
        )


def _starts(result: Lint) -> Iterator[Finding]:
    answers = result.measure.answers.total()
    blank = sum(count for text, count in result.first_tokens if text and not text.strip())
    if answers and blank / answers >= _BLANK_STARTS:
        yield Finding(
            "warning",
            f"{percent(blank, answers)} of the answers begin with white space alone",
            "That is how it looks when a mask begins one token too early, or answers were cut out "
            "of a text with their line feeds.",
            "Look at the beginnings in colour below. If the target does not begin its answers so, "
            "strip them.",
            "answers",
        )


def _reasoning(result: Lint) -> Iterator[Finding]:
    missing = result.tally.notes["reasoning_not_rendered"]
    if missing:
        yield Finding(
            "warning",
            f"The reasoning of {counted(missing, 'answer')} is lost",
            "The rows have it, and the chat template does not show it: the drafter would never see "
            "the target think, and thinking is most of what a reasoning model writes.",
            "Give the template that the server uses (corpus.template_file), or set its switches "
            "(corpus.template_args), or have the target answer itself (--prompts).",
            "template",
        )
    more = {
        source.name: source.samples - source.accepted
        for source in result.tally.sources
        if source.samples > source.accepted
    }
    if more:
        yield Finding(
            "note",
            f"{counted(sum(more.values()), 'answer')} became samples of their own",
            "The chat template shows earlier answers otherwise than they were generated (without "
            "their reasoning, mostly), so each such answer is a sample with its own prompt: rows "
            f"of {some(more)} give more samples than there are rows.",
            "Nothing: this is as the server sees it. To train on last answers alone: "
            "--set corpus.last_turn_only=true.",
            "sources",
        )


def _answers(result: Lint) -> Iterator[Finding]:
    notes = result.tally.notes
    lost = {c.removeprefix(_LEFT_OUT): n for c, n in notes.items() if c.startswith(_LEFT_OUT) and n}
    lost.pop("duplicate", None)
    if lost:
        listed = " ".join(f"{n:,} × {c}: {words_of(c).meaning}" for c, n in sorted(lost.items()))
        yield Finding(
            "warning",
            f"{counted(sum(lost.values()), 'answer')} of accepted rows would be left out",
            listed,
            " ".join(dict.fromkeys(words_of(code).advice for code in sorted(lost))),
            "sources",
        )
    loops = notes["loops_keep"]
    if loops:
        many = loops / trained_samples(result) >= _SOME
        yield Finding(
            "warning" if many else "note",
            f"{have(loops, 'sample')} an answer that goes round in circles",
            "The same eight tokens come again and again, as greedy decoding of small models does; "
            "such answers are easy to draft, and teach little.",
            "Leave them out: --set corpus.on_loop=exclude.",
            "answers",
        )
