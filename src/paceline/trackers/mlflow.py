"""MLflow: a server, or a database on this machine."""

import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

from paceline.recipe.fingerprint import flatten
from paceline.trackers.tracker import RunIdentity

_TAG = "paceline.id"
_LENGTH = 500
"""Characters of a parameter that every server takes."""
_PARAMS = 100
"""Parameters that one request may hold."""
_ENDS = {"finished": "FINISHED", "interrupted": "KILLED"}


class MLflow:
    """An MLflow run that is found again by a tag.

    It is driven by the client alone: the functions of the module `mlflow` share one run in the
    whole process.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        self._uri = options.get("tracking_uri")
        self._client: Any = None
        self._run_id = ""

    def start(self, run: RunIdentity, config: dict[str, Any]) -> None:
        """Find the run, or create it; parameters that it lacks are added."""
        from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]

        self._client = client = MlflowClient(tracking_uri=self._uri)
        experiment = client.get_experiment_by_name(run.project)
        number = experiment.experiment_id if experiment else client.create_experiment(run.project)
        mine = f"tags.`{_TAG}` = '{run.id}'"
        found = client.search_runs([number], filter_string=mine, max_results=1)
        if found:
            there = found[0]
            client.update_run(there.info.run_id, status="RUNNING")
        else:
            there = client.create_run(number, run_name=run.name, tags={_TAG: run.id})
        self._run_id = there.info.run_id
        self._add_params(config, there.data.params)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """All points of a step in one request."""
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]

        now = int(time.time() * 1000)
        points = [Metric(name, value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self._run_id, metrics=points)

    def note(self, step: int, text: str) -> None:
        """A tag for each step that has a note."""
        self._client.set_tag(self._run_id, f"note.{step}", text)

    def finish(self, outcome: str) -> None:
        """Say how the run ended."""
        self._client.set_terminated(self._run_id, _ENDS.get(outcome, "FAILED"))

    def _add_params(self, config: dict[str, Any], there: Mapping[str, str]) -> None:
        from mlflow.entities import Param  # pyright: ignore[reportMissingImports]

        # A parameter cannot change; what a resumed run changed is in its notes.
        missing = [Param(key, text) for key, text in _params(config) if key not in there]
        for first in range(0, len(missing), _PARAMS):
            self._client.log_batch(self._run_id, params=missing[first : first + _PARAMS])


def _params(config: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in flatten(config).items():
        yield re.sub(r"[^\w./ -]", "_", key), str(value)[:_LENGTH]
