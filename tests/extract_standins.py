"""Workers without a target: a process of theirs begins in a moment.

Nobody looks into what they write before the next start.
"""

import os
import signal
import time
from pathlib import Path

from paceline.durable.store import write_verified
from paceline.extract.job import Job
from paceline.flow.units import Handler, Made, Task, WorkerContext
from paceline.types.rows import read_rows

POISON = "unit-000003.safetensors"


def open_poisoned(job: Job, context: WorkerContext) -> Handler:
    """One unit kills it: what a fault in a device's kernel looks like."""

    def handle(task: Task, path: Path) -> Made:
        if task.key == POISON:
            os.kill(os.getpid(), signal.SIGKILL)
        return _written(task, path, context)

    return handle


def open_reader(job: Job, context: WorkerContext) -> Handler:
    """It reads its samples from the corpus, as the real one does, and takes its time."""

    def handle(task: Task, path: Path) -> Made:
        with context.watch.call("read corpus", job.corpus):
            read_rows(job.corpus, task.payload.positions)
        time.sleep(0.03)
        return _written(task, path, context)

    return handle


def _written(task: Task, path: Path, context: WorkerContext) -> Made:
    return Made(write_verified(path, [task.key.encode()], fs=context.fs))
