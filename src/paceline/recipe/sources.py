"""The data sets of a recipe: what they are called, and what identifies them."""

from paceline.recipe.data_files import data_digest, data_name
from paceline.recipe.fingerprint import Fields, flatten
from paceline.recipe.schema import Recipe, SourceRecipe


def name_of(source: SourceRecipe) -> str:
    """The name of a data set in reports and samples."""
    return source.name or data_name(source.path)


def source_fields(recipe: Recipe) -> Fields:
    """Names, contents and use of the sources, whatever their paths; reads the files.

    Raises DataError where one is missing.
    """
    sources = [
        {
            "name": name_of(source),
            "content": data_digest(source.path),
            "split": source.split,
            "limit": source.limit,
            **_mixture(source),
        }
        for source in recipe.corpus.sources
    ]
    return flatten({"sources": sources})


def _mixture(source: SourceRecipe) -> Fields:
    """Only where it is asked for: without, the corpus is what older versions made."""
    asked = {"weight": source.weight, "max_samples": source.max_samples}
    return {name: value for name, value in asked.items() if value is not None}
