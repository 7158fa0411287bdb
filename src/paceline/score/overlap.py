"""How much of the scored prompts also stands in the prompts that were trained on."""

from collections.abc import Sequence

from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import Recipe
from paceline.recipe.stage import read_record
from paceline.rows.overlap import Overlap, grams_of
from paceline.score.job import Prompt
from paceline.types.sample import Split, read_samples

Numbers = dict[str, dict[str, int | float]]


def overlap_numbers(recipe: Recipe, run_dir: RunDir, prompts: Sequence[Prompt]) -> Numbers:
    """8-grams of the prompts against the corpus' training prompts, by data set.

    Of held-out sources of the corpus it is what `prepare` counted, over all of their prompts. For
    `score.datasets` the corpus is read once more, in a stream.
    """
    if not recipe.score.datasets:
        record = read_record(run_dir.corpus, "prepare")
        counted = record.report.get("overlap", {}) if record else {}
        scored = {prompt.dataset for prompt in prompts}
        return {name: numbers for name, numbers in counted.items() if name in scored}
    overlap = Overlap()
    for prompt in prompts:
        overlap.add_heldout(prompt.dataset, grams_of(list(prompt.turns)))
    for sample in read_samples(run_dir.samples(recipe)):
        if sample.split is Split.TRAIN:
            overlap.add_train(grams_of(sample.messages))
    return {name: count.numbers() for name, count in overlap.counts().items()}
