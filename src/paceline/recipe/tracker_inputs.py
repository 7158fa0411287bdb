"""What a recipe says of trackers, and what no recipe may say: secrets in urls."""

import re
from collections.abc import Iterator, Mapping

from paceline.masking import names_secret, url_holds_secret
from paceline.recipe.fingerprint import flatten
from paceline.recipe.schema import Recipe, TrainRecipe

OPTIONS: Mapping[str, tuple[str, ...]] = {
    "wandb": ("entity", "group", "mode"),
    "trackio": ("group", "server_url", "space_id"),
    "tensorboard": (),
    "mlflow": ("tracking_uri",),
}
"""Names in `train.tracker_options`, by the tracker that takes them."""

_PROJECT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def tracker_problems(train: TrainRecipe) -> Iterator[str]:
    """Everything impossible in the trackers and their options, a sentence each."""
    if len(set(train.trackers)) != len(train.trackers):
        yield f"train.trackers: {list(train.trackers)} names one twice. Give each once."
    if not _PROJECT.fullmatch(train.tracker_project):
        yield (
            f'train.tracker_project: "{train.tracker_project}" is no name that every tracker '
            "takes. Use at most 128 letters, digits, `.`, `_` and `-`, a letter or digit first."
        )
    for name in train.tracker_options:
        takers = [tracker for tracker, names in OPTIONS.items() if name in names]
        if names_secret(name):
            yield (
                f"train.tracker_options.{name}: credentials do not belong into a recipe, which is "
                "copied into every run. Put them into the environment (WANDB_API_KEY, HF_TOKEN, "
                "MLFLOW_TRACKING_TOKEN, and so on)."
            )
        elif not takers:
            known = sorted({option for names in OPTIONS.values() for option in names})
            yield f"train.tracker_options.{name}: no such option. Give {', '.join(known)}."
        elif not set(takers) & set(train.trackers):
            yield (
                f"train.tracker_options.{name}: only {' and '.join(takers)} takes it. Name it in "
                "train.trackers, or remove the option."
            )


def secret_problems(recipe: Recipe) -> Iterator[str]:
    """Keys whose value is a url with a secret in it, a sentence each; none repeats the value."""
    for key, value in flatten(recipe).items():
        # Arguments of a template are texts of somebody's prompt, and nothing follows a url there.
        is_prompt = key.startswith("corpus.template_args.")
        if isinstance(value, str) and not is_prompt and url_holds_secret(value):
            yield (
                f"{key}: a url with a password or a token in it. A recipe is copied into every "
                "run: put credentials into the environment."
            )
