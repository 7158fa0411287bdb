"""How the score is measured: the conventions of known harnesses, and what a recipe says instead."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from paceline.recipe.data_files import data_digest, data_name
from paceline.recipe.schema import Recipe, ScoreRecipe, ScoreSetRecipe


@dataclass(frozen=True, kw_only=True)
class Convention:
    """What a harness does, as far as it moves τ."""

    wording: Literal["plain", "asks"]
    """`plain`: the data set's own words. `asks`: with an instruction around problems and code."""
    take: Literal["hash", "shuffle", "first"]
    """How prompts are chosen: those of the lowest hash, the first of a seeded permutation (left as
    they are where all are taken), or the first as they stand."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Prompts by adapter; all of what is not named."""
    is_first_turn_only: bool = False
    average: Literal["pooled", "prompt_mean"]
    """Which τ it reports."""
    max_new_tokens: int
    temperatures: tuple[float, ...]
    """Those that it measures at."""
    seed: int = 0
    warmup: int = 1


_DFLASH = {
    "mt_bench": 80, "gsm8k": 128, "humaneval": 164, "math500": 128, "mbpp": 128, "alpaca": 128,
}  # fmt: skip
_DEEPSPEC = {
    "mt_bench": 80, "gsm8k": 500, "humaneval": 164, "math500": 500, "mbpp": 256, "alpaca": 500,
}  # fmt: skip
_EAGLE = dict.fromkeys(("prompts", *_DFLASH), 80)

CONVENTIONS: Mapping[str, Convention] = {
    "paceline": Convention(
        wording="plain", take="hash", average="pooled", max_new_tokens=256, temperatures=(0.0,)
    ),
    "dflash": Convention(
        wording="asks", take="shuffle", counts=_DFLASH, average="prompt_mean",
        max_new_tokens=2048, temperatures=(0.0, 1.0),
    ),
    "eagle": Convention(
        wording="plain", take="first", counts=_EAGLE, average="pooled",
        max_new_tokens=1024, temperatures=(0.0, 1.0), warmup=3,
    ),
    "deepspec": Convention(
        wording="asks", take="shuffle", counts=_DEEPSPEC, is_first_turn_only=True,
        average="pooled", max_new_tokens=2048, temperatures=(1.0,), seed=980406,
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ScoreSettings:
    """A score recipe with nothing left open."""

    name: str
    """Of the convention."""
    convention: Convention
    max_new_tokens: int
    warmup: int
    seed: int
    max_prompts: int | None
    temperatures: tuple[float, ...]

    def limit_of(self, asked: ScoreSetRecipe) -> int | None:
        """Prompts taken of a data set; None for all."""
        for limit in (asked.limit, self.max_prompts, self.convention.counts.get(asked.adapter)):
            if limit is not None:
                return limit
        return None


def score_settings(score: ScoreRecipe) -> ScoreSettings:
    """What the recipe says, and the convention's for what it leaves open."""
    convention = CONVENTIONS[score.convention]

    def said(name: str) -> Any:
        value = getattr(score, name)
        return getattr(convention, name) if value is None else value

    return ScoreSettings(
        name=score.convention,
        convention=convention,
        max_new_tokens=said("max_new_tokens"),
        warmup=said("warmup"),
        seed=said("seed"),
        max_prompts=score.max_prompts,
        temperatures=tuple(said("temperatures")),
    )


def set_name(asked: ScoreSetRecipe) -> str:
    """The name of a data set in the result."""
    return asked.name or data_name(asked.path)


def score_fields(score: ScoreRecipe) -> dict[str, Any]:
    """What determines a score, for its fingerprint; reads the data sets.

    Without data sets and of the plain convention they are what older versions recorded, so that a
    score of theirs is told by its format alone. Raises DataError where a data set is missing.
    """
    settings = score_settings(score)
    fields: dict[str, Any] = {
        "max_prompts": score.max_prompts,
        "max_new_tokens": settings.max_new_tokens,
        "budgets": score.budgets,
        "walk_budgets": score.walk_budgets,
        "walk_check_prompts": score.walk_check_prompts,
        "seed": settings.seed,
    }
    if score.convention != "paceline":
        fields["convention"] = score.convention
    if score.warmup is not None:
        fields["warmup"] = score.warmup
    if settings.temperatures != (0.0,):
        fields["temperatures"] = settings.temperatures
        fields["sampling"] = [score.top_k, score.top_p, score.min_p]
        fields["drafting"] = score.drafting
    if score.datasets:
        fields["datasets"] = [
            {
                "name": set_name(asked),
                "content": data_digest(asked.path),
                "adapter": asked.adapter,
                "limit": asked.limit,
            }
            for asked in score.datasets
        ]
    return fields


def convention_record(score: ScoreRecipe) -> dict[str, Any]:
    """For the result: what the convention set, and what the recipe said instead of it."""
    settings = score_settings(score)
    set_here = {
        name: value
        for name in ("max_prompts", "max_new_tokens", "warmup", "seed", "temperatures")
        if (value := getattr(score, name)) is not None
    }
    return {"name": settings.name, **asdict(settings.convention), "set_by_recipe": set_here}


def score_problems(recipe: Recipe) -> Iterator[str]:
    """What is impossible in the data sets to score on, a sentence each."""
    for number, asked in enumerate(recipe.score.datasets):
        if not asked.path:
            yield f"score.datasets.{number}.path: empty. Give a file, a folder, or hf:OWNER/NAME."
    temperatures = recipe.score.temperatures
    if temperatures is not None and (
        not temperatures or len(set(temperatures)) < len(temperatures)
    ):
        yield "score.temperatures: give each temperature once, and at least one."
    names = Counter(set_name(s) for s in recipe.score.datasets if s.name or s.path)
    for name, times in names.items():
        if times > 1:
            yield (
                f'score.datasets: {times} of them are named "{name}", so the result could not '
                "tell them apart. Give each its own `name`."
            )
    trained = {s.path for s in recipe.corpus.sources if s.split == "train" and s.path}
    for number, asked in enumerate(recipe.score.datasets):
        if asked.path in trained:
            yield (
                f"score.datasets.{number}.path: {asked.path} is also trained on, so a score on it "
                "would not be held out. Use another file."
            )


def score_notes(recipe: Recipe) -> Iterator[str]:
    """What is possible and may still surprise."""
    score = recipe.score
    if not any(score_settings(score).temperatures):
        idle = [name for name in ("top_k", "min_p", "drafting") if getattr(score, name)]
        for name in (*idle, *(["top_p"] if score.top_p < 1 else [])):
            yield f"score.{name} has no effect at temperature 0."
