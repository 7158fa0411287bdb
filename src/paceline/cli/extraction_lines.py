"""An extraction in lines: its workers, what waits, what hangs."""

from collections import Counter
from collections.abc import Iterator

from paceline.status_parts import Extraction, Stuck, WorkerNow
from paceline.watch.words import counted, short_bytes, span

_NAMED = 8
"""Workers that are named; of more, how many are in each state."""

_WORTH_TELLING = 1.0
"""Seconds of waiting below which nothing is said of it."""


def extraction_lines(extraction: Extraction, now: float) -> Iterator[str]:
    """What does not fit into the table of stages; `now` in seconds since the epoch."""
    if extraction.state:
        seen = f"{extraction.units_skipped:,} of {counted(extraction.units, 'shard')} so far"
        known = f": {seen}" if extraction.units else ""
        yield f"extract: {extraction.state} what is there and verified{known}"
    if extraction.workers:
        yield f"extract: {_workers(extraction.workers, now)}"
    for stuck in extraction.stuck:
        yield f"extract: {_hanging(stuck, now)}"
    if extraction.waiting is not None:
        waiting = extraction.waiting
        yield f"extract: waits for {span(now - waiting.since)}: {waiting.reason}"
    if extraction.backlog_units or extraction.staging_bytes:
        limit = extraction.staging_limit
        of = "" if limit is None else f" of {short_bytes(limit)}"
        yield (
            f"extract: {counted(extraction.backlog_units, 'shard')} on the way to the store, "
            f"{short_bytes(extraction.staging_bytes)}{of} in staging"
        )
    stalls = {k: s for k, s in extraction.stall_seconds.items() if s >= _WORTH_TELLING}
    if stalls:
        told = ", ".join(f"{span(seconds)} for {kind}" for kind, seconds in sorted(stalls.items()))
        yield f"extract: waited in all {told}"
    if extraction.free_bytes is not None:
        yield f"extract: {short_bytes(extraction.free_bytes)} free"


def _workers(workers: tuple[WorkerNow, ...], now: float) -> str:
    if len(workers) > _NAMED:
        states = Counter(worker.state for worker in workers)
        split = ", ".join(f"{count} {state}" for state, count in states.most_common())
        return f"{counted(len(workers), 'worker')}: {split}"
    return "; ".join(
        f"worker {w.number}{f' on {w.device}' if w.device else ''} {w.state}"
        f"{f' {w.unit}' if w.unit else ''} for {span(now - w.since)}"
        for w in workers
    )


def _hanging(stuck: Stuck, now: float) -> str:
    who = "the extraction itself" if stuck.worker is None else f"worker {stuck.worker}"
    state = f" (process state {stuck.process_state})" if stuck.process_state else ""
    return f"{who}: {stuck.call} {stuck.path} has not returned for {span(now - stuck.since)}{state}"
