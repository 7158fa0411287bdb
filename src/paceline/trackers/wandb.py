"""Weights & Biases."""

from collections.abc import Mapping
from typing import Any

from paceline.trackers.tracker import RunIdentity

_STEP = "step"
_FINISH = 8.0
"""Seconds that W&B may upload at the end. The rest stays in the run directory for `wandb sync`."""


class Wandb:
    """A W&B run whose id is the run's; its files lie in `wandb/` of the run directory."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._options = dict(options)
        self._run: Any = None

    def start(self, run: RunIdentity, config: dict[str, Any]) -> None:
        """Open or resume the run. Raises RuntimeError where there are no credentials."""
        import wandb  # pyright: ignore[reportMissingImports]

        mode = self._options.get("mode") or wandb.setup().settings.mode
        if mode == "online" and wandb.run is None and not wandb.login(prompt=False):
            # Else W&B would ask for a key on the terminal.
            raise RuntimeError(
                "no credentials. Set WANDB_API_KEY, or ask for mode offline in "
                "train.tracker_options and send the run with `wandb sync` later."
            )
        settings = wandb.Settings(
            silent=True,
            console="off",
            # The address of a repository may hold a token.
            disable_git=True,
            save_code=False,
            finish_timeout=_FINISH,
        )
        self._run = wandb.init(
            project=run.project,
            id=run.id,
            name=run.name,
            resume="allow",
            reinit="create_new",
            dir=str(run.folder),
            config=config,
            settings=settings,
            **self._options,
        )
        # W&B's own steps only rise: a run that goes on from an earlier checkpoint would lose
        # every point up to where it was before.
        self._run.define_metric(_STEP, hidden=True)
        self._run.define_metric("*", step_metric=_STEP)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Points over the step of the training."""
        self._run.log({_STEP: step, **metrics})

    def note(self, step: int, text: str) -> None:
        """A text in the run's history."""
        self._run.log({_STEP: step, "note": text})

    def finish(self, outcome: str) -> None:
        """Upload what is left; a run that did not finish is shown as failed, and can go on."""
        self._run.finish(exit_code=0 if outcome == "finished" else 1)
