"""The first row of the data that can be used, prepared as `prepare` would; nothing is written."""

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from paceline.corpus.mask import renderer_of
from paceline.corpus.rows import Accepted, RowPreparer
from paceline.recipe.schema import Recipe
from paceline.recipe.sources import name_of
from paceline.rows.formats import read_rows
from paceline.target.chat import check_template_args
from paceline.types import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LOOKED_AT = 100
"""Rows, before giving up."""


@dataclass(frozen=True, kw_only=True)
class FirstRow:
    """What became of the first rows of the first source that is trained on."""

    source: str
    """Its name."""
    tokenizer: "PreTrainedTokenizerBase"
    row: int = 0
    """Line of the file, or place in its array, from 1; 0 without a sample."""
    sample: Sample | None = None
    """None where none of the rows looked at can be used."""
    rejected: tuple[str, ...] = ()
    """Reasons, with details, of the rows before it."""


def first_row(recipe: Recipe) -> FirstRow:
    """Prepare rows in order until one can be used, a hundred at most.

    Raises DataError for a source that cannot be read, TargetError for a target without a usable
    tokenizer or template, RecipeError for template arguments that Paceline sets itself.
    """
    check_template_args(recipe.corpus.template_args)
    renderer = renderer_of(recipe)
    tokenizer = renderer.tokenizer
    rows = RowPreparer(renderer, recipe.corpus, recipe.regenerate.enabled)
    source = next(s for s in recipe.corpus.sources if s.split == "train")
    name = name_of(source)
    rejected: list[str] = []
    for row in islice(read_rows(source.path, source.limit), _LOOKED_AT):
        if row.is_blank:
            continue
        if row.fault is not None:
            rejected.append(f"{row.fault.reason}: {row.fault.detail}")
            continue
        outcome = rows.prepare(row.value or {}, name, heldout=False)
        if isinstance(outcome, Accepted):
            return FirstRow(
                source=name,
                tokenizer=tokenizer,
                row=row.line,
                sample=outcome.sample,
                rejected=tuple(rejected),
            )
        rejected.append(f"{outcome.reason}: {outcome.detail}")
    return FirstRow(source=name, tokenizer=tokenizer, rejected=tuple(rejected))
