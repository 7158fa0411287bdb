"""Whether a recipe fits its target: what later stages would refuse, told from the config alone."""

from collections.abc import Iterator
from pathlib import Path

from paceline.durable.errors import RecipeError
from paceline.recipe.schema import Recipe
from paceline.recipe.score_inputs import score_settings
from paceline.target.families import LayerKind
from paceline.target.spec import TargetSpec, read_spec
from paceline.target.taps import taps_of


def check_fit(recipe: Recipe) -> None:
    """Raise RecipeError that lists everything in which a recipe cannot fit its target, a line each.

    Reads the target's JSON files, no weight. Raises TargetError as `read_spec` does.
    """
    spec = read_spec(Path(recipe.target.path), identify=False)
    problems = [
        *shape_problems(recipe, spec),
        *vocabulary_problems(recipe, spec),
        *_mask_problems(recipe, spec),
    ]
    if problems:
        raise RecipeError("\n".join(problems))


def shape_problems(recipe: Recipe, spec: TargetSpec) -> Iterator[str]:
    """Taps beyond the target's layers, and answers beyond its positions."""
    try:
        taps_of(recipe.extract, spec.num_layers)
    except RecipeError as error:
        yield str(error)
    answer = score_settings(recipe.score).max_new_tokens
    block = recipe.drafter.block_size
    if answer + block >= spec.max_position:
        yield (
            f"score.max_new_tokens: {answer} and a block of {block} leave no room for a prompt in "
            f"the target's {spec.max_position} positions. Lower it."
        )


def vocabulary_problems(recipe: Recipe, spec: TargetSpec) -> Iterator[str]:
    """A reduced vocabulary that cannot be chosen; a warm start keeps its source's."""
    size = recipe.drafter.draft_vocab
    if size is None or recipe.drafter.warm_start is not None:
        return
    if size > spec.tokenizer_size:
        yield (
            f"drafter.draft_vocab: {size} is more than the target's {spec.tokenizer_size} tokens. "
            "Lower it, or give null for all of them."
        )
    ends = sum(token < spec.tokenizer_size for token in {*spec.eos_token_ids})
    if size < ends:
        yield (
            f"drafter.draft_vocab: {size} has no room for the target's {ends} end tokens. Raise it."
        )


def mask_problem(token: int, spec: TargetSpec) -> str:
    """Why masked slots cannot have this embedding row, whatever the corpus; empty if they can."""
    if not 0 <= token < spec.vocab_size:
        return f"is no row of the embedding, which has {spec.vocab_size}"
    if token in spec.eos_token_ids:
        return "ends an answer"
    if token == spec.pad_token_id:
        return "is the padding token"
    return "begins every text" if token == spec.bos_token_id else ""


def fit_notes(recipe: Recipe, spec: TargetSpec) -> Iterator[str]:
    """What may go well, and which a later stage may refuse."""
    kinds = {*spec.layer_kinds} - {LayerKind.FULL}
    if kinds:
        names = ", ".join(sorted(kind.value for kind in kinds))
        yield (
            f"this target has {names} layers: everything but `score` works with it, which will "
            "refuse."
        )
    longest = recipe.corpus.max_length
    if longest > spec.max_position:
        yield (
            f"corpus.max_length: {longest} is more than the target's {spec.max_position} "
            "positions: a sample longer than those is refused when the target is to read it. Lower "
            "corpus.max_length to that."
        )


def _mask_problems(recipe: Recipe, spec: TargetSpec) -> Iterator[str]:
    token = recipe.drafter.mask_token_id
    problem = "" if token is None else mask_problem(token, spec)
    if problem:
        yield (f"drafter.mask_token_id: {token} {problem}. Leave the key out to have one chosen.")
