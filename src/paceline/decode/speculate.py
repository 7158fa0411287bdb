"""Plain and speculative decoding of one request, greedily; the output is the target's either way.

Both run through the same session, so a speed-up compares nothing but the drafting.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from paceline.decode.ddtree import build_tree, top_log_probs
from paceline.decode.session import TargetSession
from paceline.decode.verify import walk
from paceline.drafter.dflash import DFlash
from paceline.drafter.session import DraftSession
from paceline.target.head import TargetHead
from paceline.target.load import Target
from paceline.types.tree import DraftTree


@dataclass(frozen=True)
class Decoded:
    """One decoded answer."""

    ids: tuple[int, ...]
    """The answer, cut after its end token or at the limit."""
    rounds: tuple[int, ...]
    """Tokens each verification committed, the target's own included.

    A round is cut after an end token; the round that meets the token limit counts whole, since
    the limit, unlike the end, says nothing about the drafter (and a cut would bias the mean).
    """
    finish: str
    """`stop` or `length`."""
    cpu_seconds: dict[str, float]
    """By phase: prefill, draft, tree, verify, commit."""
    wall_seconds: float
    """From the first token on: the prompt's processing is in neither side's rate."""

    @property
    def tau(self) -> float:
        """Mean tokens per verification; 0 where there was none."""
        return sum(self.rounds) / len(self.rounds) if self.rounds else 0.0


@dataclass(frozen=True)
class Answer(Decoded):
    """A plainly decoded answer with what is needed to simulate any drafter on it."""

    features: torch.Tensor = field(repr=False, default_factory=lambda: torch.empty(0))
    """[S + n - 1, L, H]: prompt and answer, the last token excepted (it was never processed)."""
    margins: tuple[float, ...] = ()
    """Per answer token, the gap between the two best logits that chose it."""


class _Phases:
    """CPU seconds of this process by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.process_time()
        try:
            yield
        finally:
            spent = time.process_time() - start
            self.seconds[phase] = self.seconds.get(phase, 0.0) + spent


def decode_plain(
    target: Target,
    prompt: Sequence[int],
    *,
    taps: tuple[int, ...],
    max_new_tokens: int,
    eos_ids: frozenset[int],
) -> Answer:
    """Greedy decoding, one token per pass of the target."""
    phases = _Phases()
    session = TargetSession(target, taps)
    with phases("prefill"):
        logits, features = session.prefill(prompt)
    start = time.perf_counter()
    rows, ids, margins = [features], [], []
    while True:
        # argmax as in verification: of exactly equal logits both must take the same one.
        token = int(logits.argmax())
        first, second = logits.topk(2).values.tolist()
        ids.append(token)
        margins.append(first - second)
        if token in eos_ids or len(ids) == max_new_tokens:
            break
        with phases("verify"):
            all_logits, features = session.verify(DraftTree.chain(token, ()))
        session.commit((0,), 1)
        rows.append(features)
        logits = all_logits[-1]
    return Answer(
        ids=tuple(ids),
        rounds=(1,) * (len(ids) - 1),
        finish="stop" if ids[-1] in eos_ids else "length",
        cpu_seconds=phases.seconds,
        wall_seconds=time.perf_counter() - start,
        features=torch.cat(rows),
        margins=tuple(margins),
    )


def decode_speculative(
    target: Target,
    drafter: DFlash,
    head: TargetHead,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    eos_ids: frozenset[int],
    budget: int | None = None,
) -> Decoded:
    """Greedy speculative decoding: a chain, or a draft tree of `budget` nodes.

    Token for token what `decode_plain` gives, wherever the target's two best logits differ by
    more than the rounding of differently shaped products. `head` is `drafter.narrowed` of the
    target's, made once for all requests.
    """
    phases = _Phases()
    session = TargetSession(target, drafter.config.taps)
    with phases("prefill"):
        logits, features = session.prefill(prompt)
    ids, rounds = [int(logits.argmax())], []
    start = time.perf_counter()
    with torch.inference_mode():
        draft = DraftSession(drafter, head)
        while ids[-1] not in eos_ids and len(ids) < max_new_tokens:
            with phases("draft"):
                draft.extend(features)
                slot_logits = draft.slot_logits(ids[-1])
            with phases("tree"):
                tree = _tree(ids[-1], drafter, slot_logits, budget)
            with phases("verify"):
                logits, features = session.verify(tree)
            with phases("commit"):
                accepted = walk(tree, logits.argmax(dim=-1).tolist())
                session.commit(accepted.path, len(tree))
                features = features[list(accepted.path)]
            committed = _until_end(accepted.tokens, eos_ids)
            ids.extend(committed)
            rounds.append(len(committed))
    ids = ids[:max_new_tokens]
    return Decoded(
        ids=tuple(ids),
        rounds=tuple(rounds),
        finish="stop" if ids[-1] in eos_ids else "length",
        cpu_seconds=phases.seconds,
        wall_seconds=time.perf_counter() - start,
    )


def _tree(root: int, drafter: DFlash, slot_logits: torch.Tensor, budget: int | None) -> DraftTree:
    if budget is None:
        return DraftTree.chain(root, drafter.to_target(slot_logits.argmax(dim=-1)).tolist())
    return build_tree(root, *top_log_probs(slot_logits, budget, drafter.d2t), budget)


def _until_end(tokens: Sequence[int], eos_ids: frozenset[int]) -> tuple[int, ...]:
    for count, token in enumerate(tokens, start=1):
        if token in eos_ids:
            return tuple(tokens[:count])
    return tuple(tokens)
