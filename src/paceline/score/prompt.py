"""One prompt: each of its turns decoded plainly and speculatively, compared, and walked."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import torch

from paceline.decode.simulate import accepted_depths, method_name, walk_rounds
from paceline.decode.speculate import Answer, Decoded, decode_plain, decode_speculative
from paceline.drafter.checkpoint import load_drafter
from paceline.drafter.dflash import DFlash
from paceline.durable.errors import TargetError
from paceline.score.datasets import later_prompt
from paceline.score.job import Job, Prompt
from paceline.score.results import MethodResult, PromptResult, at_temperature
from paceline.target.chat import load_tokenizer
from paceline.target.head import TargetHead
from paceline.target.load import Target, load_target

_WARMUP_TOKENS = 16
"""Of a warm-up's answer: every shape occurs in its first rounds."""


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
        self._limit = min(job.max_new_tokens, _WARMUP_TOKENS)
        for prompt in job.warmup:
            first = replace(prompt, later=(), check_walk=True)
            for _ in self._turns(first):
                pass
        self._limit = job.max_new_tokens

    def __call__(self, prompt: Prompt) -> tuple[PromptResult, ...]:
        """Score one prompt: a result for each of its turns."""
        return tuple(self._turns(prompt))

    def _turns(self, prompt: Prompt) -> Iterator[PromptResult]:
        answers: list[str] = []
        for turn in range(1 + len(prompt.later)):
            ids = prompt.input_ids
            if turn:
                args = self._job.template_args
                ids = later_prompt(self._tokenizer, args, prompt, answers)
            result = self._answer(prompt, turn, ids)
            yield result
            if prompt.later:
                ids = list(result.answer_ids)
                answers.append(str(self._tokenizer.decode(ids, skip_special_tokens=True)))

    @cached_property
    def _tokenizer(self):
        return load_tokenizer(self._job.target.path, self._job.template_file)

    def _answer(self, prompt: Prompt, turn: int, ids: tuple[int, ...]) -> PromptResult:
        """All ways of decoding the answer to the context `ids`."""
        job, block = self._job, self._drafter.config.block_size
        plain = decode_plain(
            self._target,
            ids,
            taps=self._drafter.config.taps,
            # The walk's last round looks a block beyond the limit.
            max_new_tokens=self._limit + block - 1,
            eos_ids=self._eos,
        )
        answer = plain.ids[: self._limit]
        walked = self._walk(ids, plain, len(answer))
        decoded: list[int | None] = [None, *job.budgets]
        if prompt.check_walk:
            decoded += [b for b in job.walk_budgets if b not in job.budgets]
        temperature = 0.0
        methods = {
            at_temperature(method_name(budget), temperature): self._decode(
                ids, plain, budget, walked
            )
            for budget in decoded
        }
        for name, rounds in walked.items():
            methods.setdefault(name, MethodResult(rounds=rounds, how="walk"))
        asked = [str(m["content"]) for m in prompt.messages if m["role"] == "user"][-1:]
        return PromptResult(
            prompt_id=prompt.prompt_id,
            dataset=prompt.dataset,
            domain=prompt.domain,
            language=prompt.language,
            turn=turn,
            temperature=temperature,
            prompt_tokens=len(ids),
            answer_ids=answer,
            finish="stop" if answer[-1] in self._eos else "length",
            plain_steps=len(plain.ids) - 1,
            plain_cpu_seconds=plain.cpu_seconds,
            plain_phase_seconds=_phase_seconds(plain),
            plain_wall_seconds=plain.wall_seconds,
            methods=methods,
            text=None if prompt.is_in_corpus else [*asked, *prompt.later][turn],
        )

    def _decode(
        self,
        prompt: tuple[int, ...],
        plain: Answer,
        budget: int | None,
        walked: dict[str, tuple[int, ...]],
    ) -> MethodResult:
        """The one place where a method is decoded."""
        decoded: Decoded = decode_speculative(
            self._target,
            self._drafter,
            self._head,
            prompt,
            max_new_tokens=self._limit,
            eos_ids=self._eos,
            budget=budget,
        )
        wanted = plain.ids[: self._limit]
        differs = _first_difference(decoded.ids, wanted)
        return MethodResult(
            rounds=decoded.rounds,
            how="decoded",
            identical=differs is None,
            divergence=differs,
            margin=None if differs is None else plain.margins[min(differs, len(wanted) - 1)],
            walk_rounds=walked[method_name(budget)],
            cpu_seconds=decoded.cpu_seconds,
            phase_seconds=_phase_seconds(decoded),
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


def _phase_seconds(decoded: Decoded) -> dict[str, float] | None:
    """Wall time by phase, of decoders that measure it."""
    return getattr(decoded, "phase_seconds", None)


def _first_difference(ids: tuple[int, ...], wanted: tuple[int, ...]) -> int | None:
    for position, (a, b) in enumerate(zip(ids, wanted, strict=False)):
        if a != b:
            return position
    return None if len(ids) == len(wanted) else min(len(ids), len(wanted))
