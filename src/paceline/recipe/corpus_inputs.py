"""What of a corpus recipe is checked by itself, and what of it came after the first version."""

from collections.abc import Iterator
from typing import Any, get_args

from paceline.recipe.fingerprint import Fields, flatten
from paceline.recipe.schema import CorpusRecipe, Recipe, Role

_LATER = (
    "on_length",
    "consecutive_roles",
    "on_loop",
    "loop_repeats",
    "on_same_prompt",
    "max_overlap",
)

UNSAID: Fields = flatten({"corpus": {name: getattr(CorpusRecipe(), name) for name in _LATER}})
"""Settings that a corpus made by an older version does not tell of: their defaults."""


def later_settings(corpus: CorpusRecipe) -> dict[str, Any]:
    """Those of the later settings that are not at their defaults, for fingerprints.

    At its default each changes nothing of what an older version made, which so stays valid.
    """
    plain = CorpusRecipe()
    asked = {name: getattr(corpus, name) for name in (*_LATER, "roles")}
    return {name: value for name, value in asked.items() if value != getattr(plain, name)}


def corpus_problems(recipe: Recipe) -> Iterator[str]:
    """What is impossible, a sentence each."""
    roles = get_args(Role)
    for name, role in recipe.corpus.roles.items():
        if role not in roles:
            yield f'corpus.roles.{name}: "{role}" is no role. Give one of {", ".join(roles)}.'
        if not name:
            yield "corpus.roles: a role without a name. Write `name: role`."
    for number, source in enumerate(recipe.corpus.sources):
        if source.weight is not None and source.split == "heldout":
            yield (
                f"corpus.sources.{number}.weight: held-out prompts are not mixed. Leave "
                "it out, or say how many to take (max_samples)."
            )
