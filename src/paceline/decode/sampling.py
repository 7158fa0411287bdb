"""Choosing the next token, with randomness that belongs to the place and not to the moment.

The noise of a token is a function of (seed, request, absolute position, token id) alone, so that
an answer depends neither on its batch-mates nor on what was computed before, and speculative
decoding draws the very tokens that plain decoding would draw. It comes from Philox4x64-10 (NumPy's
`random_raw`, whose stream is fixed for all versions), keyed by 128 bits of SHA-256 over seed and
request, with the position in the third counter word and the stream in the fourth: each pair has
2^128 draws of its own.

With u uniform, E = -log(u) is exponential, and argmax of p / E is a draw from p: the Gumbel-max
trick (argmax of log p - log E) without its second logarithm.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
import torch

RequestKey = int | str
"""Names a request; equal keys draw equal noise."""

_EDGE = 1e-4


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The distribution that a token is drawn from; the filters act in this order.

    Raises ValueError for values out of range.
    """

    temperature: float = 0.0
    """0 is greedy: no draw, and no filter has an effect."""
    top_k: int = 0
    """Most probable tokens that are kept; 0 keeps all."""
    top_p: float = 1.0
    """The smallest set of most probable tokens that holds this share of what `top_k` kept."""
    min_p: float = 0.0
    """Tokens of at least this many times the highest probability."""

    def __post_init__(self) -> None:
        for name, is_right, what in (
            ("temperature", self.temperature >= 0.0, "0 or more"),
            ("top_k", self.top_k >= 0, "0 (all tokens) or more"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0, at most 1"),
            ("min_p", 0.0 <= self.min_p < 1.0, "at least 0, below 1"),
        ):
            if not is_right:
                raise ValueError(f"sampling: {name} {getattr(self, name)} must be {what}")

    @property
    def is_greedy(self) -> bool:
        """Whether nothing is drawn."""
        return self.temperature == 0.0

    @property
    def keeps_all(self) -> bool:
        """Whether no token is filtered away."""
        return not self.top_k and self.top_p >= 1.0 and self.min_p <= 0.0


GREEDY = Sampling()


class Stream(IntEnum):
    """Draws at one position that have nothing to do with each other."""

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2


class PositionKeyedNoise:
    """The noise of one request."""

    def __init__(self, seed: int, key: RequestKey) -> None:
        text = f"{seed}:{type(key).__name__}:{key}"
        digest = hashlib.sha256(text.encode()).digest()
        self._key = np.frombuffer(digest[:16], dtype="<u8").astype(np.uint64)

    def exponentials(
        self, position: int, token_ids: np.ndarray, stream: Stream = Stream.TARGET
    ) -> np.ndarray:
        """float64, as `token_ids` [n] (rising): the exponential draws of tokens at a position."""
        return -np.log(self._uniforms(position, int(token_ids[-1]) + 1, stream)[token_ids])

    def uniform(self, position: int, stream: Stream) -> float:
        """One draw between 0 and 1 at a position."""
        return float(self._uniforms(position, 1, stream)[0])

    def _uniforms(self, position: int, count: int, stream: Stream) -> np.ndarray:
        counter = np.array([0, 0, position, int(stream)], dtype=np.uint64)
        raw = np.random.Philox(key=self._key, counter=counter).random_raw(count)
        # The half keeps u away from 0 and 1, where the logarithm would leave the reals.
        return ((raw >> np.uint64(11)) + 0.5) * 2.0**-53


def choose(
    logits: torch.Tensor,
    noises: Sequence[PositionKeyedNoise],
    positions: Sequence[int],
    sampling: Sampling,
) -> list[int]:
    """Choose a token for every row of `logits` [N, V], any float type and device.

    `positions` [N] are the absolute positions of the tokens to be chosen, counted from the first
    token of the prompt. Greedy at temperature 0, where the lowest of equal ids wins and `noises`
    may be empty; else a draw from the filtered softmax(logits / temperature). Raises ValueError
    for logits that are not numbers.
    """
    if sampling.is_greedy:
        chosen = logits.argmax(dim=-1)
        peaks = logits.gather(-1, chosen[:, None])[:, 0]
        if not bool(torch.isfinite(peaks).all()):
            raise _not_numbers(peaks, positions)
        return chosen.tolist()
    probabilities = torch.softmax(logits.float() / sampling.temperature, dim=-1).cpu()
    rows = probabilities.numpy()
    return [
        _draw(row, noise, position, sampling)
        for row, noise, position in zip(rows, noises, positions, strict=True)
    ]


def distribution(
    logits: torch.Tensor, position: int, sampling: Sampling
) -> tuple[np.ndarray, np.ndarray]:
    """Rising ids and probabilities (float64, sum 1) of what `choose` draws from `logits` [V].

    At temperature 0 the chosen token alone. Raises ValueError as `choose` does.
    """
    if sampling.is_greedy:
        return np.array(choose(logits[None], (), [position], sampling)), np.ones(1)
    row = torch.softmax(logits.float() / sampling.temperature, dim=-1).cpu().numpy()
    if np.isnan(row[0]):
        raise _not_numbers(torch.from_numpy(row[:1]), [position])
    ids = kept_tokens(row, sampling)
    weights = row[ids].astype(np.float64)
    return ids, weights / weights.sum()


def choice_margin(
    logits: torch.Tensor, noise: PositionKeyedNoise | None, position: int, sampling: Sampling
) -> float:
    """How far `choose` is from another token for `logits` [V], in units of logits.

    The gap between the two best; of a draw, between those that lead after the noise. 0 where the
    edge of a filter, moved by a ten-thousandth, makes it choose another.
    """
    if sampling.is_greedy or noise is None:
        first, second = logits.topk(2).values.tolist()
        return first - second
    ids, weights = distribution(logits, position, sampling)
    scores = np.log(weights) - np.log(noise.exponentials(position, ids))
    winner = int(ids[np.argmax(scores)])
    moved = (choose(logits[None], [noise], [position], near) for near in _near(sampling, logits))
    if any(other != [winner] for other in moved):
        return 0.0
    if len(ids) == 1:
        return float("inf")
    second, first = np.partition(scores, -2)[-2:]
    return float(first - second) * sampling.temperature


def _near(sampling: Sampling, logits: torch.Tensor) -> Iterator[Sampling]:
    """Samplings whose filters differ by so little that rounding may decide between them."""
    for factor in (1 - _EDGE, 1 + _EDGE):
        if sampling.top_p < 1.0:
            yield replace(sampling, top_p=min(1.0, sampling.top_p * factor))
        if sampling.min_p > 0.0:
            yield replace(sampling, min_p=sampling.min_p * factor)
    if 0 < sampling.top_k < len(logits):
        *_, last, next_one = logits.float().topk(sampling.top_k + 1).values.tolist()
        if last - next_one < _EDGE:
            yield replace(sampling, top_k=sampling.top_k + 1)


def race(
    ids: np.ndarray,
    weights: np.ndarray,
    noise: PositionKeyedNoise,
    position: int,
    stream: Stream = Stream.TARGET,
) -> int:
    """Draw one of `ids` (rising) with probability proportional to its weight, by the noise."""
    return int(ids[np.argmax(weights / noise.exponentials(position, ids, stream))])


def _draw(row: np.ndarray, noise: PositionKeyedNoise, position: int, sampling: Sampling) -> int:
    if np.isnan(row[0]):
        raise _not_numbers(torch.from_numpy(row[:1]), [position])
    kept = kept_tokens(row, sampling)
    return race(kept, row[kept], noise, position)


def kept_tokens(probabilities: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Rising ids of the tokens that the filters keep, of probabilities [V]; at least one.

    Of equally probable tokens the lower id comes first.
    """
    if sampling.keeps_all:
        return np.flatnonzero(probabilities)
    kept: np.ndarray | None = None
    if 0 < sampling.top_k < len(probabilities):
        kept = _top_k(probabilities, sampling.top_k)
    if sampling.top_p < 1.0:
        if kept is None:
            kept = nucleus(probabilities, sampling.top_p)
        else:
            rest = probabilities[kept].astype(np.float64)
            kept = kept[nucleus(rest / rest.sum(), sampling.top_p)]
    if kept is None:
        kept = np.flatnonzero(probabilities)
    least = sampling.min_p * probabilities.max()
    kept = kept[probabilities[kept] >= least]
    return kept[probabilities[kept] > 0]


def _top_k(probabilities: np.ndarray, count: int) -> np.ndarray:
    """Rising ids of the `count` most probable tokens."""
    least = np.partition(probabilities, -count)[-count]
    above = np.flatnonzero(probabilities > least)
    equal = np.flatnonzero(probabilities == least)[: count - len(above)]
    return np.sort(np.concatenate((above, equal)))


def nucleus(probabilities: np.ndarray, top_p: float) -> np.ndarray:
    """Rising ids of the smallest set of most probable tokens with a mass of at least `top_p`.

    `probabilities` is [V]; of equally probable tokens the lower id comes first; at least one
    token is kept.
    """
    # Tokens below (1 - p) / V weigh less than 1 - p together, so those above hold the nucleus
    # and only they need sorting.
    size = len(probabilities)
    candidates = np.flatnonzero(probabilities >= (1.0 - top_p) / size * 0.999)
    order = np.argsort(-probabilities[candidates], kind="stable")
    mass = np.cumsum(probabilities[candidates][order], dtype=np.float64)
    count = int(np.searchsorted(mass, top_p, side="left")) + 1
    return np.sort(candidates[order[:count]])


def _not_numbers(values: torch.Tensor, positions: Sequence[int]) -> ValueError:
    bad = [p for p, v in zip(positions, values.tolist(), strict=True) if not np.isfinite(v)]
    return ValueError(f"the target's logits are not finite at position {bad[0]}")
