"""What is drafted in a round, and which of it is accepted, for each way of drafting."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch

from paceline.decode.ddtree import draft_tree
from paceline.decode.residual import Drawn, accept_chain, draw_chain
from paceline.decode.sampling import PositionKeyedNoise, Sampling, choose
from paceline.decode.verify import Accepted, walk
from paceline.drafter.proposer import Proposer
from paceline.types.tree import DraftTree, TreeShape


class Drafting(StrEnum):
    """How a chain's tokens come from the drafter's distributions; trees are always its best.

    Where the target is greedy, so is the drafter.
    """

    GREEDY = "greedy"
    """The most probable ones. Any temperature, and token for token what plain decoding draws."""
    COUPLED = "coupled"
    """Drawn with the noise that the target draws with at the same position: where the two
    distributions are alike, so are the draws. Token for token what plain decoding draws."""
    SAMPLED = "sampled"
    """Drawn with noise of their own, and judged by the residual rule: distributed as what plain
    decoding draws."""


@dataclass(frozen=True)
class Proposal:
    """What the target is asked to verify."""

    tree: DraftTree
    drawn: tuple[Drawn, ...] | None = None
    """Where the residual rule judges it."""


@dataclass(frozen=True, kw_only=True)
class Proposing:
    """One request's way of drafting."""

    drafter: Proposer
    sampling: Sampling
    noise: PositionKeyedNoise | None
    shape: TreeShape | None
    """None drafts a chain."""
    temperatures: Sequence[float] | None = None
    """Of a tree, by depth; None for 1."""
    drafting: Drafting = Drafting.GREEDY

    def __post_init__(self) -> None:
        if not self.sampling.is_greedy and self.noise is None:
            raise ValueError("sampling needs the request's noise")
        if self.shape is not None and self.drafting is not Drafting.GREEDY:
            raise ValueError(f"a draft tree holds the best tokens; it cannot be {self.drafting}")

    def propose(self, root: int, slot_logits: torch.Tensor, first: int) -> Proposal:
        """Draft from `slot_logits` fp32 [D, K] behind `root`; `first` is the position after it."""
        to_target = self.drafter.to_target
        if self.shape is not None:
            d2t, temperatures = self.drafter.d2t, self.temperatures
            return Proposal(
                draft_tree(root, slot_logits, self.shape, d2t=d2t, temperatures=temperatures)
            )
        if self.noise is None or self.sampling.is_greedy or self.drafting is Drafting.GREEDY:
            return Proposal(DraftTree.chain(root, to_target(slot_logits.argmax(dim=-1)).tolist()))
        if self.drafting is Drafting.SAMPLED:
            drawn = draw_chain(slot_logits, to_target, self.sampling, self.noise, first)
            return Proposal(DraftTree.chain(root, [d.token for d in drawn]), tuple(drawn))
        logits = self._by_target_id(slot_logits)
        depths = range(first, first + len(logits))
        tokens = choose(logits, [self.noise] * len(logits), depths, self.sampling)
        return Proposal(DraftTree.chain(root, tokens))

    def accept(self, proposal: Proposal, logits: torch.Tensor, first: int) -> Accepted:
        """Judge a proposal by the target's logits fp32 [n, V], a row per node."""
        if proposal.drawn is not None and self.noise is not None:
            return accept_chain(proposal.drawn, logits, self.sampling, self.noise, first)
        noise = [] if self.noise is None else [self.noise]
        depths, is_greedy = proposal.tree.depths, self.sampling.is_greedy
        if is_greedy and logits.device.type != "cpu":
            # One wait for the device; on the host a row that nobody asks for is saved.
            everywhere = [first + depth for depth in depths]
            return walk(proposal.tree, choose(logits, (), everywhere, self.sampling).__getitem__)

        def choice(node: int) -> int:
            return choose(logits[node][None], noise, [first + depths[node]], self.sampling)[0]

        return walk(proposal.tree, choice)

    def _by_target_id(self, slot_logits: torch.Tensor) -> torch.Tensor:
        """Columns of draft ids as columns of target ids, so that a token meets its own noise."""
        rows = self.drafter.proposed_ids
        if rows is None:
            return slot_logits
        full = slot_logits.new_full(
            (slot_logits.shape[0], self.drafter.config.vocab_size), float("-inf")
        )
        return full.index_copy(1, rows.to(slot_logits.device), slot_logits)
