"""The terms of the objective over one chunk of logits; docs/algorithms.md, "Objectives"."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from paceline.objective.position_weights import (
    length_losses,
    streak_weights,
    tree_losses,
    tree_threshold,
    tree_weights,
)
from paceline.objective.slopes import Softmax, Targets, Workspace
from paceline.recipe.objective_terms import ObjectiveTerm


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """R rows, of a blocks of D slots where a term hangs on whole blocks (else a is 0)."""

    labels: torch.Tensor
    """int64 [R]."""
    counted: torch.Tensor
    """bool [R]: whether the drafter can propose the label."""
    slots: torch.Tensor
    """int64 [R]: the row's place on the flat grid of the blocks."""
    valid: torch.Tensor
    """bool [a, D]."""
    proposed: torch.Tensor
    """bool [a, D]."""
    weights: Mapping[int, torch.Tensor]
    """fp32 [R] by the number of the term: its weights as far as they hang on the slot alone."""

    def grid(self, rows: torch.Tensor, fill: float) -> torch.Tensor:
        """Values [R, ...] on the grid [a, D, ...], `fill` where there is no row."""
        flat = rows.new_full((self.valid.numel(), *rows.shape[1:]), fill)
        flat[self.slots] = rows
        return flat.view(*self.valid.shape, *rows.shape[1:])

    def rows(self, grid: torch.Tensor) -> torch.Tensor:
        """[R] of the grid [a, D]."""
        return grid.flatten()[self.slots]


def chunk_loss(
    logits: torch.Tensor,
    chunk: Chunk,
    terms: Sequence[tuple[int, ObjectiveTerm]],
    scales: Sequence[float],
    targets: Targets | None,
    sums: torch.Tensor,
    space: Workspace,
    *,
    wants_slopes: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Add the terms' sums to `sums`; the rows' nll and hits, and the gradient towards the logits.

    `logits` [R, V] are used up. The gradient is that of the sums times `scales`.
    """
    work = _Work(logits, chunk, terms, targets, space)
    for number, term in terms:
        sums[number] += work.add(term, scales[number], chunk.weights.get(number))
    return work.nll, work.hit, work.slopes() if wants_slopes else logits


class _Work:
    """Terms are added one by one; what two of them share is computed once."""

    def __init__(
        self,
        logits: torch.Tensor,
        chunk: Chunk,
        terms: Sequence[tuple[int, ObjectiveTerm]],
        targets: Targets | None,
        space: Workspace,
    ) -> None:
        self._chunk, self._targets, self._space = chunk, targets, space
        budgets = [t.budget for _, t in terms if t.kind == "tree" or t.positions == "tree"]
        width = min(max(budgets, default=0), logits.shape[1])
        best = logits.topk(width, dim=-1).values if width else None
        top = logits.amax(dim=-1, keepdim=True)
        own = logits.gather(1, chunk.labels[:, None])
        self.hit = (own >= top)[:, 0] & chunk.counted
        self._x = logits.sub_(top)
        only_labels = all(t.kind in ("cross_entropy", "tree") for _, t in terms)
        self._own = Softmax(self._x, 1.0, space, reuse=only_labels)
        self._softened = {1.0: self._own}
        nll = (self._own.log_total + (top - own))[:, 0]
        self.nll = nll.masked_fill(~chunk.counted, torch.inf)
        self._best = None if best is None else best - top - self._own.log_total
        self._label = torch.zeros_like(top)
        self._top: tuple[torch.Tensor, torch.Tensor] | None = None
        self._teacher: dict[float, torch.Tensor] = {}
        self._overlaps: _Overlap | None = None

    def add(self, term: ObjectiveTerm, scale: float, weights: torch.Tensor | None) -> torch.Tensor:
        """Note the term's part of the gradient; its sum. `weights` are those of the slot alone."""
        if term.kind == "tree":
            return self._tree(term, scale)
        if term.kind == "expected_length":
            return self._length(scale)
        if weights is None:
            raise ValueError(f"{term.kind}: no weights")
        weights = weights.to(self.nll.dtype)
        if term.positions not in ("uniform", "decay"):
            weights = weights * self._reached(term)
        match term.kind:
            case "cross_entropy":
                weights, losses = self._cross_entropy(scale, weights)
            case "confident_right":
                weights, losses = self._confident_right(scale, weights)
            case "overconfident_wrong":
                weights, losses = self._overconfident_wrong(scale, weights)
            case "kl":
                losses = self._kl(term.temperature, (scale * weights)[:, None])
            case "reverse_kl":
                losses = self._reverse_kl(term.temperature, (scale * weights)[:, None])
            case _:
                losses = self._overlapping(term, (scale * weights)[:, None])
        return (weights * losses).sum()

    def slopes(self) -> torch.Tensor:
        """The gradient [R, V] of all terms towards the logits."""
        slopes = self._own.slopes()
        for temperature, softened in self._softened.items():
            if temperature != 1.0:
                slopes.add_(softened.slopes())
        for temperature, factor in self._teacher.items():
            slopes.addcmul_(self._target.at(temperature)[0], factor)
        slopes.scatter_add_(1, self._chunk.labels[:, None], self._label)
        if self._top is not None:
            slopes.scatter_add_(1, *self._top)
        return slopes

    def _cross_entropy(
        self, scale: float, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weights = weights * self._chunk.counted
        self._towards_label(-scale * weights)
        return weights, torch.where(self._chunk.counted, self.nll, 0.0)

    def _confident_right(
        self, scale: float, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Entropy where the best token is right: its gradient is -q (log q + H)."""
        weights = weights * self.hit
        factor = (scale * weights)[:, None]
        surprise = self._own.mean(self._x)
        # With log q = x - log_total, log q + H = x - surprise.
        self._own.add(factor * surprise)
        self._own.add_times(self._x, -factor)
        return weights, (self._own.log_total - surprise)[:, 0]

    def _overconfident_wrong(
        self, scale: float, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest probability where its token is wrong: its gradient is m (e - q)."""
        weights = weights * ~self.hit
        largest = 1.0 / self._own.total
        factor = (scale * weights)[:, None] * largest
        self._own.add(-factor)
        if self._top is None:
            self._top = self._x.argmax(dim=-1, keepdim=True), factor
        else:
            self._top = self._top[0], self._top[1] + factor
        return weights, largest[:, 0]

    def _kl(self, temperature: float, factor: torch.Tensor) -> torch.Tensor:
        """T^2 KL(p || q), both softened: its gradient is T (q - p)."""
        softened = self._soft(temperature)
        probabilities, negative_entropy = self._target.at(temperature)
        cross = softened.log_total - self._space.dot(probabilities, self._x) / temperature
        softened.add(temperature * factor)
        self._towards_target(temperature, -temperature * factor)
        return temperature**2 * (negative_entropy + cross)[:, 0]

    def _reverse_kl(self, temperature: float, factor: torch.Tensor) -> torch.Tensor:
        """T^2 KL(q || p): its gradient is T q (log q - log p - KL)."""
        softened = self._soft(temperature)
        ratio = self._space.take(f"ratio {temperature}", self._x.shape)
        self._target.log_at(temperature, out=ratio)
        ratio.neg_().add_(self._x, alpha=1.0 / temperature).sub_(softened.log_total)
        divergence = softened.mean(ratio)
        softened.add_times(ratio, temperature * factor)
        softened.add(-temperature * factor * divergence)
        return temperature**2 * divergence[:, 0]

    def _overlapping(self, term: ObjectiveTerm, factor: torch.Tensor) -> torch.Tensor:
        """TV and the LK losses (arXiv 2602.23881), functions of alpha = sum of min(p, q)."""
        overlap = self._overlap()
        alpha = overlap.alpha
        match term.kind:
            case "tv":
                self._raise_overlap(-factor)
                return (1.0 - alpha)[:, 0]
            case "lk_alpha":
                alpha = alpha.clamp_min(torch.finfo(alpha.dtype).tiny)
                self._raise_overlap(-factor / alpha)
                return -alpha.log()[:, 0]
            case "lk_hybrid":
                share = torch.exp(-term.eta * alpha)
                divergence = self._kl(1.0, factor * share)
                self._raise_overlap(-factor * (1.0 - share))
                return share[:, 0] * divergence + ((1.0 - share) * (1.0 - alpha))[:, 0]
            case _:
                raise ValueError(f"{term.kind}: not a term of the objective")

    def _length(self, scale: float) -> torch.Tensor:
        valid = self._chunk.valid
        with torch.enable_grad():
            alpha = self._chunk.grid(self._overlap().alpha[:, 0], 1.0).requires_grad_()
            total = length_losses(alpha, valid).sum()
            (slope,) = torch.autograd.grad(total, alpha)
        self._raise_overlap(scale * self._chunk.rows(slope)[:, None])
        return total.detach()

    def _tree(self, term: ObjectiveTerm, scale: float) -> torch.Tensor:
        valid = self._chunk.valid
        with torch.enable_grad():
            log_own = self._log_own().requires_grad_()
            edge = self._edge(term.budget)
            total = tree_losses(log_own, edge, valid, term.temperature).sum()
            (slope,) = torch.autograd.grad(total, log_own)
        self._towards_label(scale * self._chunk.rows(slope) * self._chunk.counted)
        return total.detach()

    def _reached(self, term: ObjectiveTerm) -> torch.Tensor:
        """Each row's weight by what precedes it in its block."""
        chunk = self._chunk
        log_own = self._log_own()
        counted = chunk.valid & chunk.proposed
        if term.positions == "tree":
            grid = tree_weights(
                log_own, self._edge(term.budget), counted, chunk.valid,
                alpha=term.alpha, softness=term.temperature,
            )  # fmt: skip
        else:
            grid = streak_weights(log_own, counted, chunk.valid, term.alpha)
        return chunk.rows(grid)

    def _log_own(self) -> torch.Tensor:
        return self._chunk.grid(-self.nll, -torch.inf)

    def _edge(self, budget: int) -> torch.Tensor:
        if self._best is None:
            raise ValueError("no best tokens were kept")
        return tree_threshold(self._chunk.grid(self._best, -torch.inf), budget)

    def _towards_label(self, factor: torch.Tensor) -> None:
        """Add `factor` [R] times the gradient of log q(label), e - q."""
        self._label += factor[:, None]
        self._own.add(-factor[:, None])

    def _towards_target(self, temperature: float, factor: torch.Tensor) -> None:
        known = self._teacher.get(temperature)
        self._teacher[temperature] = factor if known is None else known + factor

    def _raise_overlap(self, factor: torch.Tensor) -> None:
        """Add `factor` [R, 1] times the gradient of alpha, q (1[q <= p] - s)."""
        overlap = self._overlap()
        self._own.add_times(overlap.below, factor)
        self._own.add(-factor * overlap.share)

    def _overlap(self) -> "_Overlap":
        if self._overlaps is None:
            own = self._own
            target, _ = self._target.at(1.0)
            # By the total of q: comparing and adding up need no division of whole rows.
            scale = self._target.mass() * own.total
            target = torch.mul(target, scale, out=self._space.take("product", target.shape))
            below = self._space.take("below", target.shape)
            torch.le(own.exponentials, target, out=below)
            smaller = torch.minimum(own.exponentials, target, out=target)
            alpha = smaller.sum(dim=-1, keepdim=True) / own.total
            self._overlaps = _Overlap(alpha=alpha, below=below, share=own.mean(below))
        return self._overlaps

    def _soft(self, temperature: float) -> Softmax:
        if temperature not in self._softened:
            self._softened[temperature] = Softmax(self._x, temperature, self._space)
        return self._softened[temperature]

    @property
    def _target(self) -> Targets:
        if self._targets is None:
            raise ValueError("no distribution of the target was given")
        return self._targets


@dataclass(frozen=True)
class _Overlap:
    alpha: torch.Tensor
    """[R, 1]: sum of min(p, q), the probability that the target accepts."""
    below: torch.Tensor
    """[R, V]: 1 where q <= p, else 0."""
    share: torch.Tensor
    """[R, 1]: what q gives to those."""
