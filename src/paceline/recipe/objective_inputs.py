"""What the objective is told: judged by its words alone."""

import dataclasses
from collections.abc import Iterator

from paceline.recipe.objective_terms import (
    NEEDS_ACCEPTANCE,
    NEEDS_TEACHER,
    WEIGHS_ITSELF,
    ObjectiveTerm,
)
from paceline.recipe.schema import Recipe, TrainRecipe

_STREAKS = ("streak", "streak_decay", "tree")


def objective_of(recipe: TrainRecipe) -> tuple[ObjectiveTerm, ...]:
    """The terms, each with its `gamma`; decaying cross-entropy where none is named."""
    terms = recipe.objective or (ObjectiveTerm(kind="cross_entropy"),)
    return tuple(
        dataclasses.replace(term, gamma=recipe.gamma if term.gamma is None else term.gamma)
        for term in terms
    )


def chunk_copies(recipe: TrainRecipe) -> int:
    """Buffers as large as a chunk's logits that the loss holds at a time."""
    terms = objective_of(recipe)
    taught = [t for t in terms if t.kind in NEEDS_TEACHER]
    if not taught and all(t.kind in ("cross_entropy", "tree") for t in terms):
        return 1
    # Logits, softmax and a product of the two; the target's logits, and twice its softmax.
    softened = {t.temperature if t.kind in ("kl", "reverse_kl") else 1.0 for t in taught}
    ratios = {t.temperature for t in taught if t.kind == "reverse_kl"}
    overlap = any(t.kind in NEEDS_ACCEPTANCE for t in taught)
    own = 3 + len(softened - {1.0}) + len(ratios) + overlap
    return own + bool(taught) + 2 * len(softened)


def needs_all_tokens(recipe: TrainRecipe) -> bool:
    """Whether a term reads what the target gives to tokens that a drafter does not propose."""
    return any(term.kind in NEEDS_ACCEPTANCE for term in recipe.objective)


def objective_problems(recipe: Recipe) -> Iterator[str]:
    """Everything impossible in the terms beyond the bounds of their numbers, a sentence each."""
    terms = recipe.train.objective
    for number, term in enumerate(terms):
        key = f"train.objective.{number}"
        if term.kind in NEEDS_TEACHER and not recipe.extract.last:
            yield (
                f"{key}.kind: {term.kind} reads the target's distribution, which is made of `last`."
                " Set extract.last to true."
            )
        begin, end = term.ramp
        if begin > end:
            yield f"{key}.ramp: {list(term.ramp)} falls. Give its beginning first."
        for name in _unused(term):
            value = getattr(term, name)
            shown = list(value) if isinstance(value, tuple) else value
            yield f"{key}.{name}: {shown} has no effect on {_described(term)}. Leave it out."
    if terms and not any(map(_counts, terms)):
        yield "train.objective: no term has a weight above 0: nothing would be learnt. Raise one."


def _counts(term: ObjectiveTerm) -> bool:
    """Whether it has a weight above 0 in some step: none is at the very end of the run."""
    comes = term.end_weight is not None and term.end_weight > 0 and term.ramp[0] < 1.0
    return term.weight > 0 or comes


def objective_notes(recipe: Recipe) -> Iterator[str]:
    """What is possible in the terms and may still surprise."""
    for number, term in enumerate(recipe.train.objective):
        if term.kind != "cross_entropy" and term.positions in _STREAKS:
            yield (
                f"train.objective.{number}.positions: {term.positions} weights are those of "
                f"cross_entropy; with {term.kind} they are a weighting like another."
            )
        if term.kind == "reverse_kl":
            yield (
                f"train.objective.{number}.kind: reverse_kl seeks one mode: it is known to cost a "
                "draft tree a third of its accepted tokens."
            )


def _unused(term: ObjectiveTerm) -> Iterator[str]:
    """Fields that the term does not read and that somebody has set."""
    itself = term.kind in WEIGHS_ITSELF
    read = {
        "ramp": term.end_weight is not None,
        "positions": not itself,
        "gamma": not itself and term.positions in ("decay", "streak_decay"),
        "alpha": not itself and term.positions in _STREAKS,
        "temperature": term.kind in ("kl", "reverse_kl", "tree") or _in_tree(term),
        "eta": term.kind == "lk_hybrid",
        "budget": term.kind == "tree" or _in_tree(term),
    }
    for field in dataclasses.fields(term):
        if not read.get(field.name, True) and getattr(term, field.name) != field.default:
            yield field.name


def _in_tree(term: ObjectiveTerm) -> bool:
    return term.kind not in WEIGHS_ITSELF and term.positions == "tree"


def _described(term: ObjectiveTerm) -> str:
    if term.kind in WEIGHS_ITSELF:
        return term.kind
    ramp = " without end_weight" if term.end_weight is None else ""
    return f"{term.kind} with {term.positions} positions{ramp}"
