"""What a worker process does: load the target, prove it, and make the units it is handed."""

from paceline.extract.job import Job
from paceline.flow.units import Handler, WorkerContext


def open_worker(job: Job, context: WorkerContext) -> Handler:
    """Load the target, prove that it is captured right, and return the handler of a unit.

    The proof is the self-check on a few samples and, where the job asks for it, stored samples
    that are captured again. A task's payload is a `UnitWork`; the answer's `info` are `UnitTimes`.

    Raises TargetError for a target that cannot be loaded, is another one than planned with, or
    fails a check. The handler raises TargetError for hidden states that are not finite and for
    token ids processed that are not those asked for, and whatever `write_shard` raises.
    """
    # Not at the top: the supervisor hands this function on, and does without torch.
    import torch

    from paceline.extract.making import UnitMaker

    # Where torch is loaded only now, nobody has told it yet.
    torch.set_num_threads(job.target.threads)
    return UnitMaker(job, context)
