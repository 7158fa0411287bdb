"""Answers of held-out prompts, each token with how it came about.

The tokens are decoded step by step: a character whose bytes are spread over several tokens is
shown once its last token is there, so one piece of text may stand for several tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from paceline.report.collect import RunView
from paceline.report.result import Method, PromptScore

DEEPEST = 8
"""Deeper tokens share the colour of this depth."""

_PROMPT_SHOWN = 1500
"""Characters of a prompt that are shown."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """How a token of an answer came about."""

    kind: str
    """`first`: of the prompt's own pass. `own`: the target's at the end of a round. `drafted`.
    `end`: the end token, of which the rounds do not tell whether it was drafted. `after`: behind
    the point up to which the rounds are known."""
    round: int = 0
    """Counted from 1; 0 outside of the rounds."""
    depth: int = 0
    """Of a drafted token, from 1."""

    @property
    def css(self) -> str:
        """Class of the colour."""
        return f"d{min(self.depth, DEEPEST)}" if self.kind == "drafted" else self.kind

    @property
    def words(self) -> str:
        """For the tooltip."""
        match self.kind:
            case "first":
                return "the target's first token, before any draft"
            case "own":
                return f"round {self.round}: the target's own token"
            case "drafted":
                return f"round {self.round}: drafted at depth {self.depth}, accepted"
            case "end":
                return f"round {self.round}: the end token"
            case _:
                return ""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Text of one token, or of several that make one character together."""

    text: str
    origins: tuple[Origin, ...]

    @property
    def css(self) -> str:
        """Class of the colour: that of the token which completes the text."""
        return self.origins[-1].css

    @property
    def title(self) -> str:
        """Tooltip."""
        return "; ".join(dict.fromkeys(o.words for o in self.origins if o.words))


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """One answer as one method decoded it."""

    method: str
    how: str
    tau: float | None
    rounds: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """One prompt with its decodings."""

    label: str
    """`median`, `best`, `worst`."""
    score: PromptScore
    prompt: str | None
    """None where the corpus no longer has it."""
    decodings: tuple[Decoding, ...]


@dataclass(frozen=True, kw_only=True)
class SampleText:
    """What the page shows of the decoded text."""

    prompts: tuple[Sampled, ...] = ()
    method: str = ""
    """By whose τ the prompts were chosen."""
    missing: str = ""
    """Why there is no text, or not all of it."""

    @property
    def origins(self) -> Iterator[Origin]:
        """Of every token that is shown."""
        for sampled in self.prompts:
            for decoding in sampled.decodings:
                for piece in decoding.pieces:
                    yield from piece.origins


def sample_text(view: RunView) -> SampleText:
    """The prompts of median, best and worst τ, decoded and coloured."""
    result = view.result
    if result is None:
        return SampleText(missing="Nothing is decoded yet: `paceline score` does it.")
    tree = result.best_tree
    methods = [name for name in ("chain", tree) if name is not None]
    chosen = choose(result.prompts, methods[-1])
    if not chosen:
        return SampleText(missing="No prompt had a round of drafting.")
    if view.recipe is None:
        return SampleText(missing="The recipe does not say which tokenizer the text needs.")
    path = Path(view.recipe.target.path) / "tokenizer.json"
    try:
        decode = _decoder(path)
    except (OSError, ValueError) as error:
        return SampleText(missing=f"The text needs the target's tokenizer. {path}: {error}")
    try:
        prompts = _prompt_ids(
            view.samples, {score.prompt_id for _, score in chosen if score.text is None}
        )
    except OSError:
        prompts = {}
    return SampleText(
        method=methods[-1],
        prompts=tuple(
            Sampled(
                label=label,
                score=score,
                prompt=_prompt_text(score, prompts, decode),
                decodings=tuple(
                    _decoding(name, score, decode) for name in methods if name in score.methods
                ),
            )
            for label, score in chosen
        ),
        missing=""
        if prompts or all(score.text is not None for _, score in chosen)
        else f"The prompts are not there any more: {view.samples}.",
    )


def _prompt_text(score: PromptScore, prompts: dict[str, list[int]], decode: "Decode") -> str | None:
    if score.text is not None:
        return _shortened(score.text)
    ids = prompts.get(score.prompt_id)
    return _shortened(decode(ids)) if ids else None


def choose(prompts: Sequence[PromptScore], method: str) -> list[tuple[str, PromptScore]]:
    """Median, best and worst prompt by the method's τ; fewer where there are fewer prompts."""
    ranked = sorted(
        (tau, number)
        for number, prompt in enumerate(prompts)
        if method in prompt.methods and (tau := prompt.methods[method].tau) is not None
    )
    picks: dict[int, str] = {}
    for label, place in (("median", (len(ranked) - 1) // 2), ("best", -1), ("worst", 0)):
        if ranked:
            picks.setdefault(ranked[place][1], label)
    return [(label, prompts[number]) for number, label in picks.items()]


def origins(count: int, rounds: Sequence[int], *, is_ended: bool) -> list[Origin]:
    """How each of `count` answer tokens came about.

    Args:
        count: tokens of the answer.
        rounds: tokens that each round committed; the last of each is the target's own. Of the
            last round some may lie behind the answer's limit.
        is_ended: whether the last token is an end token.

    """
    found = [Origin(kind="first")]
    for number, size in enumerate(rounds, start=1):
        found += [Origin(kind="drafted", round=number, depth=d) for d in range(1, size)]
        found.append(Origin(kind="own", round=number))
    found += [Origin(kind="after")] * (count - len(found))
    found = found[:count]
    if is_ended and count > 1 and found[-1].round:
        # A round is cut behind an end token, be it drafted or the target's own.
        found[-1] = Origin(kind="end", round=found[-1].round)
    return found


def pieces(ids: Sequence[int], found: Sequence[Origin], decode: "Decode") -> tuple[Piece, ...]:
    """The text of `ids` piece by piece; joined it is the text of all.

    A piece ends where the text so far does not end in the replacement character, which a decoder
    puts for bytes that are no character yet.
    """
    made: list[Piece] = []
    # A decoder may treat the start of a text in its own way (a space left out): each piece is
    # what the tokens of the one before and its own give more than the former alone.
    before = start = 0
    for end in range(1, len(ids) + 1):
        text = decode(ids[before:end])
        known = decode(ids[before:start])
        is_last = end == len(ids)
        if is_last or (len(text) > len(known) and not text.endswith("\ufffd")):
            made.append(Piece(text=text[len(known) :], origins=tuple(found[start:end])))
            before, start = start, end
    return tuple(made)


Decode = Callable[[Sequence[int]], str]


def _decoding(name: str, score: PromptScore, decode: Decode) -> Decoding:
    method = score.methods[name]
    ids = score.answer_ids
    found = origins(len(ids), _rounds(method), is_ended=score.finish == "stop")
    return Decoding(
        method=name,
        how=method.how,
        tau=method.tau,
        rounds=len(method.rounds),
        pieces=pieces(ids, found, decode),
    )


def _rounds(method: Method) -> tuple[int, ...]:
    """The rounds that lead through the answer of plain decoding, which is the one that is shown."""
    if method.how == "decoded" and not method.identical:
        return method.walk_rounds or ()
    return method.rounds


def _decoder(path: Path) -> Decode:
    from tokenizers import Tokenizer

    data = path.read_bytes()
    try:
        tokenizer = Tokenizer.from_buffer(data)
    except Exception as error:
        # The library raises bare exceptions for a file that it cannot read.
        raise ValueError(f"not a tokenizer ({error})") from error
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False)


class _Sample(msgspec.Struct):
    """A corpus line, as far as a prompt needs it."""

    prompt_id: str
    input_ids: list[int]
    loss_spans: list[tuple[int, int]] = []


def _prompt_ids(path: Path, wanted: set[str]) -> dict[str, list[int]]:
    """Tokens before the first that the target wrote, of the prompts of these ids."""
    found: dict[str, list[int]] = {}
    decoder = msgspec.json.Decoder(_Sample)
    needles = {prompt_id.encode(): prompt_id for prompt_id in wanted}
    with path.open("rb") as lines:
        for line in lines:
            # Most lines are not wanted, and to look is a tenth of the time to decode.
            if not any(needle in line for needle in needles):
                continue
            try:
                sample = decoder.decode(line)
            except (msgspec.MsgspecError, UnicodeError):
                continue
            if sample.prompt_id in wanted and sample.prompt_id not in found:
                end = sample.loss_spans[0][0] if sample.loss_spans else len(sample.input_ids)
                found[sample.prompt_id] = sample.input_ids[:end]
                if len(found) == len(wanted):
                    break
    return found


def _shortened(text: str) -> str:
    if len(text) <= _PROMPT_SHOWN:
        return text
    half = _PROMPT_SHOWN // 2
    left_out = len(text) - 2 * half
    return f"{text[:half]}\n… {left_out:,} characters left out …\n{text[-half:]}"
