"""What a recipe says of the score."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class ScoreSetRecipe:
    """A published data set, or one of your own, to score on."""

    path: str
    """As in `corpus.sources`."""
    adapter: Literal["prompts", "mt_bench", "gsm8k", "humaneval", "math500", "mbpp", "alpaca"] = (
        "prompts"
    )
    """What its rows are: `mt_bench`, `gsm8k`, `humaneval`, `math500`, `mbpp` and `alpaca` as
    published, or `prompts`: `prompt`, `messages`, or `turns`, a list of texts asked one after
    another, each after the target's own answers to those before."""
    name: str = ""
    """Name in the result; that of the file or folder where empty."""
    limit: int | None = None
    """Take at most this many of its prompts, as the convention chooses them."""


@dataclass(frozen=True, kw_only=True)
class ScoreRecipe:
    """Acceptance, measured by decoding."""

    datasets: tuple[ScoreSetRecipe, ...] = ()
    """Data sets to score on, instead of the corpus' held-out prompts."""
    convention: Literal["paceline", "dflash", "eagle", "deepspec"] = "paceline"
    """Whose harness to follow in wording, choice and number of prompts, length of answers, seed,
    warm-up, and which average is shown first; what is set below goes before it."""
    max_prompts: int | None = None
    """Prompts per data set; null takes the convention's number, which is all for `paceline`."""
    max_new_tokens: int | None = None
    """Tokens of an answer; null takes the convention's: 256 for `paceline`."""
    warmup: int | None = None
    """Prompts that each process decodes beforehand, 16 tokens of them, and does not count; null
    takes the convention's: 1 for `paceline`."""
    temperatures: tuple[float, ...] | None = None
    """Temperatures to decode at, 0 being greedy; null takes the convention's: 0 for `paceline`."""
    top_k: int = 0
    """Above temperature 0, the most probable tokens that are kept; 0 keeps all."""
    top_p: float = 1.0
    """Then the smallest set of them that holds this share."""
    min_p: float = 0.0
    """And of these, those of at least this many times the highest probability."""
    drafting: tuple[Literal["coupled", "sampled"], ...] = ()
    """Above temperature 0, other ways of drafting the chain beside the drafter's best tokens:
    `coupled` draws with the target's own noise, `sampled` draws freely and is judged by the
    residual rule, which is lossless in distribution."""
    budgets: tuple[int, ...] = (32,)
    """Draft-tree budgets that are really decoded, beside plain decoding and the chain."""
    walk_budgets: tuple[int, ...] = (16, 64)
    """Budgets measured by the exact walk over the stored answers."""
    walk_check_prompts: int = 6
    """Prompts on which each walk budget is also decoded, to prove the walk right."""
    seed: int | None = None
    """Seeds the choice of prompts and the intervals; null takes the convention's: 0 for
    `paceline`."""
