"""`paceline prepare`."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from paceline.cli.stages import StageArgs, open_run, run_stages
from paceline.cli.terminal import header, say, show
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import Recipe


@dataclass(frozen=True, kw_only=True)
class Args(StageArgs):
    """Turns conversations into tokens with the target's own chat template, and marks which of
    them are trained on. A row that cannot be used is set aside with the reason, never dropped.

    Reads: the data files of the recipe and the target's tokenizer.

    Writes: `corpus/prepared.jsonl`, and `corpus/quarantine.jsonl`: each row left out, and why.

    Example: paceline prepare recipe.yaml --preview
    """  # noqa: D205

    preview: Annotated[
        tyro.conf.FlagCreatePairsOff[bool], tyro.conf.arg(help_behavior_hint="(default: none)")
    ] = False
    """Show one sample: trained text is green on a terminal, between ⟦ and ⟧ elsewhere."""


def run(args: Args) -> int:
    """Run the command; the exit code."""
    recipe, run_dir = open_run(args, "prepare")
    code = run_stages(["prepare"], recipe, run_dir)
    if args.preview:
        _preview(recipe, run_dir)
    return code


def _preview(recipe: Recipe, run_dir: RunDir) -> None:
    from paceline.corpus.preview import TRAINED, preview
    from paceline.target.chat import load_tokenizer
    from paceline.types.sample import Split, read_samples

    regenerated = run_dir.samples(recipe)
    path = regenerated if regenerated.is_file() else run_dir.prepared
    candidates = (s for s in read_samples(path) if s.split is Split.TRAIN)
    first = next(candidates, None)
    if first is None:
        return
    if not first.loss_spans:
        first = next((s for s in candidates if s.loss_spans), first)
    header(f"sample {first.sample_id} of {first.source}")
    tokenizer = load_tokenizer(recipe.target.path, recipe.corpus.template_file)
    show(preview(first, tokenizer), marked=TRAINED)
    if not first.loss_spans:
        say("Nothing is marked: the answers come with `paceline regenerate`.")
