"""Every term of the objective again, from its published formula, for autograd in fp64."""

import itertools
import math

import torch

from paceline.objective.blocks import decay_weights
from paceline.recipe.objective_terms import ObjectiveTerm


def reference_sum(
    term: ObjectiveTerm,
    logits: torch.Tensor,
    labels: torch.Tensor,
    valid: torch.Tensor,
    proposed: torch.Tensor,
    target: torch.Tensor | None,
    columns: torch.Tensor | None = None,
) -> torch.Tensor:
    """The term's sum over blocks; slot by slot, on full grids.

    Args:
        term: with gamma.
        logits: fp64 [A, D, K] of the drafter.
        labels: int64 [A, D], draft ids.
        valid: bool [A, D].
        proposed: bool [A, D].
        target: fp64 [A, D, V] logits of the target.
        columns: int64 [K] of V that the drafter proposes.

    """
    total = logits.new_zeros(())
    for a in range(labels.shape[0]):
        block = _Block(term, logits[a], labels[a], valid[a], proposed[a])
        if target is not None:
            block.full = target[a].softmax(-1)
            drafted = target[a] if columns is None else target[a][:, columns]
            block.p = (drafted / term.temperature).softmax(-1)
            block.p_plain = drafted.softmax(-1)
            block.full = block.full if columns is None else block.full[:, columns]
        total = total + block.sum()
    return total


class _Block:
    full: torch.Tensor
    p: torch.Tensor
    p_plain: torch.Tensor

    def __init__(self, term, logits, labels, valid, proposed) -> None:
        self.term, self.logits, self.labels = term, logits, labels
        self.valid, self.proposed = valid.tolist(), proposed.tolist()
        self.q = logits.softmax(-1)
        self.depth = len(self.valid)

    def sum(self) -> torch.Tensor:
        term = self.term
        if term.kind == "expected_length":
            if not any(self.valid):
                return self.logits.new_zeros(())
            product, total = self.logits.new_ones(()), self.logits.new_zeros(())
            for j in range(self.depth):
                product = product * (self.alpha(j) if self.valid[j] else 1.0)
                total = total + product
            return 1 - total / self.depth
        if term.kind == "tree":
            inside = self.inside(self.log_own())
            return sum(
                ((1 - inside[j]) / self.depth for j in range(self.depth) if self.valid[j]),
                self.logits.new_zeros(()),
            )
        weights = self.weights()
        return sum(
            (weights[j] * self.loss(j) for j in range(self.depth) if self.valid[j]),
            self.logits.new_zeros(()),
        )

    def alpha(self, j: int) -> torch.Tensor:
        return torch.minimum(self.full[j], self.q[j]).sum()

    def own(self, j: int) -> torch.Tensor:
        return self.q[j, self.labels[j]] if self.proposed[j] else self.q.new_zeros(())

    def loss(self, j: int) -> torch.Tensor:
        term, q = self.term, self.q[j]
        right = self.proposed[j] and int(q.argmax()) == int(self.labels[j])
        softened = (self.logits[j] / term.temperature).softmax(-1)
        match term.kind:
            case "cross_entropy":
                return -self.own(j).log() if self.proposed[j] else q.new_zeros(())
            case "kl":
                return term.temperature**2 * (self.p[j] * (self.p[j] / softened).log()).sum()
            case "reverse_kl":
                return term.temperature**2 * (softened * (softened / self.p[j]).log()).sum()
            case "tv":
                return 1 - self.alpha(j)
            case "lk_alpha":
                return -self.alpha(j).log()
            case "lk_hybrid":
                share = torch.exp(-term.eta * self.alpha(j)).detach()
                divergence = (self.p_plain[j] * (self.p_plain[j] / q).log()).sum()
                return share * divergence + (1 - share) * (1 - self.alpha(j))
            case "confident_right":
                return -(q * q.log()).sum() if right else q.new_zeros(())
            case "overconfident_wrong":
                return q.new_zeros(()) if right else q.max()
        raise AssertionError(term.kind)

    def weights(self) -> list[float]:
        decay = decay_weights(self.depth + 1, self.term.gamma).double().tolist()
        match self.term.positions:
            case "uniform":
                return [1.0] * self.depth
            case "decay":
                return decay
            case "streak":
                return self.reaching([float(self.own(j).detach()) for j in range(self.depth)])
            case "streak_decay":
                streak = self.reaching([float(self.own(j).detach()) for j in range(self.depth)])
                return [s * d for s, d in zip(streak, decay, strict=True)]
        inside = [float(m.detach()) for m in self.inside(self.log_own())]
        kept = [b / a for a, b in itertools.pairwise([1.0, *inside])]
        return self.reaching(kept)

    def reaching(self, passing: list[float]) -> list[float]:
        alpha = self.term.alpha
        product, reached = 1.0, []
        for j in range(self.depth):
            product *= (1 - alpha) * passing[j] + alpha if self.valid[j] else 1.0
            reached.append(product * (self.valid[j] and self.proposed[j]))
        return [sum(reached[j:]) for j in range(self.depth)]

    def log_own(self) -> list[torch.Tensor]:
        return [
            self.own(j).log() if self.proposed[j] else self.q.new_full((), -80.0)
            for j in range(self.depth)
        ]

    def inside(self, log_own: list[torch.Tensor]) -> list[torch.Tensor]:
        scores = all_scores([q.log().tolist() for j, q in enumerate(self.q) if self.valid[j]])
        edge = scores[self.term.budget - 1] if len(scores) >= self.term.budget else -math.inf
        total, found = self.q.new_zeros(()), []
        for j in range(self.depth):
            total = total + (log_own[j] if self.valid[j] else 0.0)
            found.append(torch.sigmoid((total - edge) / self.term.temperature))
        return found


def all_scores(log_probs: list[list[float]]) -> list[float]:
    """Scores of all prefixes of all lengths, falling."""
    found = []
    for length in range(1, len(log_probs) + 1):
        found += [sum(path) for path in itertools.product(*log_probs[:length])]
    return sorted(found, reverse=True)
