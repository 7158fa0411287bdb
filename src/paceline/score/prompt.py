"""One prompt: each of its turns decoded plainly and speculatively, compared, and walked."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from paceline.decode.pair import load_pair
from paceline.decode.propose import Drafting
from paceline.decode.sampling import PositionKeyedNoise, Sampling
from paceline.decode.simulate import accepted_depths, method_name, walk_rounds
from paceline.decode.speculate import Answer, Decoded, decode_plain, decode_speculative
from paceline.drafter.dflash import DFlash
from paceline.score.datasets import later_prompt
from paceline.score.job import Job, Prompt
from paceline.score.results import MethodResult, PromptResult, at_temperature, chain_name
from paceline.target.chat import load_tokenizer
from paceline.target.head import TargetHead

_WARMUP_TOKENS = 16
"""Of a warm-up's answer: every shape occurs in its first rounds."""


@dataclass(frozen=True)
class _Asked:
    """What one answer is asked with, whatever the method."""

    ids: tuple[int, ...]
    sampling: Sampling
    noise: PositionKeyedNoise
    limit: int


class PromptScorer:
    """Holds target and drafter of one worker process."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._pair = load_pair(job.target, job.drafter)
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
        for sampling in self._job.samplings:
            answers: list[str] = []
            for turn in range(1 + len(prompt.later)):
                ids = prompt.input_ids
                if turn:
                    args = self._job.template_args
                    ids = later_prompt(self._tokenizer, args, prompt, answers)
                result = self._answer(prompt, turn, ids, sampling)
                yield result
                if prompt.later:
                    ids = list(result.answer_ids)
                    answers.append(str(self._tokenizer.decode(ids, skip_special_tokens=True)))

    @cached_property
    def _tokenizer(self):
        return load_tokenizer(self._job.target.path, self._job.template_file)

    def _answer(
        self, prompt: Prompt, turn: int, ids: tuple[int, ...], sampling: Sampling
    ) -> PromptResult:
        """All ways of decoding the answer to the context `ids`."""
        job, pair = self._job, self._pair
        noise = PositionKeyedNoise(job.seed, f"{prompt.prompt_id}/{turn}")
        asked = _Asked(ids, sampling, noise, self._limit)
        config, eos = pair.drafter.config, pair.eos_ids
        plain = decode_plain(
            pair.target,
            ids,
            taps=config.taps,
            # The walk's last round looks a block beyond the limit.
            max_new_tokens=self._limit + config.block_size - 1,
            eos_ids=eos,
            sampling=sampling,
            noise=noise,
        )
        answer = plain.ids[: self._limit]
        walked = self._walk(ids, plain, len(answer))
        temperature = sampling.temperature
        decoded: list[int | None] = [None, *job.budgets]
        if prompt.check_walk:
            decoded += [b for b in job.walk_budgets if b not in job.budgets]
        methods = {
            method_name(budget): self._decode(asked, plain, budget, walked[method_name(budget)])
            for budget in decoded
        }
        if not sampling.is_greedy:
            methods |= {
                chain_name(drafting): self._decode(asked, plain, None, None, drafting)
                for drafting in job.drafting
            }
        for name, rounds in walked.items():
            methods.setdefault(name, MethodResult(rounds=rounds, how="walk"))
        said = [str(m["content"]) for m in prompt.messages if m["role"] == "user"][-1:]
        return PromptResult(
            prompt_id=prompt.prompt_id,
            dataset=prompt.dataset,
            domain=prompt.domain,
            language=prompt.language,
            turn=turn,
            temperature=temperature,
            prompt_tokens=len(ids),
            answer_ids=answer,
            finish="stop" if answer[-1] in eos else "length",
            plain_steps=len(plain.ids) - 1,
            plain_cpu_seconds=plain.cpu_seconds,
            plain_phase_seconds=plain.phase_seconds,
            plain_wall_seconds=plain.wall_seconds,
            methods={at_temperature(name, temperature): m for name, m in methods.items()},
            text=None if prompt.is_in_corpus else [*said, *prompt.later][turn],
        )

    def _decode(
        self,
        asked: "_Asked",
        plain: Answer,
        budget: int | None,
        walked: tuple[int, ...] | None,
        drafting: Drafting = Drafting.GREEDY,
    ) -> MethodResult:
        """The one place where a method is decoded."""
        pair = self._pair
        decoded: Decoded = decode_speculative(
            pair.target,
            pair.drafter,
            pair.head,
            asked.ids,
            max_new_tokens=asked.limit,
            eos_ids=pair.eos_ids,
            budget=budget,
            sampling=asked.sampling,
            noise=asked.noise,
            drafting=drafting,
        )
        result = MethodResult(
            rounds=decoded.rounds,
            how="decoded",
            cpu_seconds=decoded.cpu_seconds,
            phase_seconds=decoded.phase_seconds,
            wall_seconds=decoded.wall_seconds,
        )
        if drafting is Drafting.SAMPLED:
            return result
        wanted = plain.ids[: asked.limit]
        differs = _first_difference(decoded.ids, wanted)
        return replace(
            result,
            identical=differs is None,
            divergence=differs,
            margin=None if differs is None else plain.margins[min(differs, len(wanted) - 1)],
            walk_rounds=walked,
        )

    def _walk(
        self, prompt: tuple[int, ...], plain: Answer, answer_length: int
    ) -> dict[str, tuple[int, ...]]:
        return walked_rounds(
            self._pair.drafter,
            self._pair.head,
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
