"""One held-out prompt: decoded plainly and speculatively, compared, and walked."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.decode.simulate import accepted_depths, method_name, walk_rounds
from paceline.decode.speculate import Answer, Decoded, decode_plain, decode_speculative
from paceline.drafter.checkpoint import load_drafter
from paceline.drafter.dflash import DFlash
from paceline.durable.errors import TargetError
from paceline.recipe.schema import TargetRecipe
from paceline.target.head import TargetHead
from paceline.target.load import Target, load_target


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a scoring worker needs; picklable."""

    target: TargetRecipe
    drafter: Path
    max_new_tokens: int
    budgets: tuple[int, ...]
    walk_budgets: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One held-out prompt."""

    prompt_id: str
    dataset: str
    input_ids: tuple[int, ...]
    check_walk: bool
    """Whether the walk's budgets are decoded here too."""

    def __repr__(self) -> str:
        return f"prompt {self.prompt_id} of {self.dataset}"


@dataclass(frozen=True, kw_only=True)
class MethodResult:
    """One way of decoding one prompt."""

    rounds: tuple[int, ...]
    how: str
    """`decoded`, or `walk`: computed from the plain answer."""
    identical: bool | None = None
    """Whether the tokens are those of plain decoding; None for a walk."""
    divergence: int | None = None
    """First answer token that differs."""
    margin: float | None = None
    """Gap between the target's two best logits there."""
    walk_rounds: tuple[int, ...] | None = None
    """What the walk says about a decoded method."""
    cpu_seconds: dict[str, float] | None = None
    wall_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class PromptResult:
    """All ways of decoding one prompt."""

    prompt_id: str
    dataset: str
    prompt_tokens: int
    answer_ids: tuple[int, ...]
    finish: str
    plain_steps: int
    """Single-token passes that the plain timings cover."""
    plain_cpu_seconds: dict[str, float]
    plain_wall_seconds: float
    methods: dict[str, MethodResult]


class PromptScorer:
    """Holds target and drafter of one worker process."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._target: Target = load_target(job.target)
        self._drafter: DFlash = load_drafter(job.drafter, device=job.target.device)
        self._drafter.to(self._target.model.dtype)
        config = self._drafter.config
        if config.target_identity != self._target.spec.identity:
            raise TargetError(
                f"{job.drafter}: trained for {config.target_name} ({config.target_identity}), "
                f"which is not the target at {job.target.path} "
                f"({self._target.spec.identity}). A drafter serves the target it was trained for."
            )
        self._head = self._drafter.narrowed(self._target.head)
        self._eos = frozenset(self._target.spec.eos_token_ids)

    def __call__(self, prompt: Prompt) -> PromptResult:
        """Score one prompt."""
        job, block = self._job, self._drafter.config.block_size
        plain = decode_plain(
            self._target,
            prompt.input_ids,
            taps=self._drafter.config.taps,
            # The walk's last round looks a block beyond the limit.
            max_new_tokens=job.max_new_tokens + block - 1,
            eos_ids=self._eos,
        )
        answer = plain.ids[: job.max_new_tokens]
        walked = self._walk(prompt.input_ids, plain, len(answer))
        decoded: list[int | None] = [None, *job.budgets]
        if prompt.check_walk:
            decoded += [b for b in job.walk_budgets if b not in job.budgets]
        methods = {
            method_name(budget): self._decode(prompt.input_ids, plain, budget, walked)
            for budget in decoded
        }
        for name, rounds in walked.items():
            methods.setdefault(name, MethodResult(rounds=rounds, how="walk"))
        return PromptResult(
            prompt_id=prompt.prompt_id,
            dataset=prompt.dataset,
            prompt_tokens=len(prompt.input_ids),
            answer_ids=answer,
            finish="stop" if answer[-1] in self._eos else "length",
            plain_steps=len(plain.ids) - 1,
            plain_cpu_seconds=plain.cpu_seconds,
            plain_wall_seconds=plain.wall_seconds,
            methods=methods,
        )

    def _decode(
        self,
        prompt: tuple[int, ...],
        plain: Answer,
        budget: int | None,
        walked: dict[str, tuple[int, ...]],
    ) -> MethodResult:
        limit = self._job.max_new_tokens
        decoded: Decoded = decode_speculative(
            self._target,
            self._drafter,
            self._head,
            prompt,
            max_new_tokens=limit,
            eos_ids=self._eos,
            budget=budget,
        )
        wanted = plain.ids[:limit]
        differs = _first_difference(decoded.ids, wanted)
        return MethodResult(
            rounds=decoded.rounds,
            how="decoded",
            identical=differs is None,
            divergence=differs,
            margin=None if differs is None else plain.margins[min(differs, len(wanted) - 1)],
            walk_rounds=walked[method_name(budget)],
            cpu_seconds=decoded.cpu_seconds,
            wall_seconds=decoded.wall_seconds,
        )

    def _walk(
        self, prompt: tuple[int, ...], plain: Answer, answer_length: int
    ) -> dict[str, tuple[int, ...]]:
        return walked_rounds(
            self._drafter,
            self._head,
            plain.features,
            torch.tensor([*prompt, *plain.ids]),
            prompt=len(prompt),
            stop=answer_length,
            end=len(plain.ids) if plain.finish == "stop" else None,
            budgets=sorted({*self._job.budgets, *self._job.walk_budgets}),
        )


def walked_rounds(
    drafter: DFlash,
    head: TargetHead,
    taps: torch.Tensor,
    input_ids: torch.Tensor,
    *,
    prompt: int,
    stop: int,
    end: int | None,
    budgets: Sequence[int],
) -> dict[str, tuple[int, ...]]:
    """The rounds of decoding a greedy answer, by method, for the chain and each budget.

    `input_ids` are `prompt` tokens and the answer, which goes a block beyond token `stop` unless it
    ends before; `stop` and `end` as in `walk_rounds`, the rest as in `accepted_depths`.
    """
    mask = torch.arange(input_ids.numel()) >= prompt
    anchors = torch.arange(prompt, prompt + max(stop - 1, 0))
    device = drafter.fc.weight.device
    depths = accepted_depths(
        drafter, head, taps, input_ids.to(device), mask.to(device), anchors.to(device), budgets
    )
    return {name: walk_rounds(values, stop=stop, end=end) for name, values in depths.items()}


def _first_difference(ids: tuple[int, ...], wanted: tuple[int, ...]) -> int | None:
    for position, (a, b) in enumerate(zip(ids, wanted, strict=False)):
        if a != b:
            return position
    return None if len(ids) == len(wanted) else min(len(ids), len(wanted))
