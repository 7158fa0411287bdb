"""Stored samples are captured again: what goes on has to be what began."""

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from paceline.durable.errors import DataError, ShardDamaged, TargetError
from paceline.durable.fs import PARTIAL
from paceline.durable.iowatch import IoWatch
from paceline.durable.store import LocalStore, Store
from paceline.extract.job import Job, Rechecked, StoredSample
from paceline.features.shard import Shard
from paceline.features.sizes import RestDtype
from paceline.target.capture import CapturePlan
from paceline.target.check import RELATIVE_L2
from paceline.target.load import Target
from paceline.target.transfer import HostCopies
from paceline.types import Features
from paceline.types.rows import read_rows
from paceline.types.sample import batch_of

_BLOCK = 8 << 20

_BF16_ROUNDING = 2.0**-8
"""Two values that are next to each other round to bf16 at most this much apart."""

_INT8_ROUNDING = 8 / 254 + 2.0**-8
"""A row of `int8o` against itself: a group of 64 is kept in steps of its largest value over 127,
so each value is at most half a step off, 1/254 of that value, and a group of 64 at most 8/254 of
its own length; the step itself is rounded."""


def recheck(
    target: Target, plan: CapturePlan, job: Job, store: Store, watch: IoWatch
) -> tuple[Rechecked, ...]:
    """Capture the job's stored samples again, and compare.

    Each is captured with the samples that it was captured with, so on the same machine every bit
    is the same; another device, thread count or batch size may round otherwise, within
    `tolerance`.

    Raises TargetError that names what is not as it was for states that differ by more, DataError
    for token ids that are not the corpus's, ShardDamaged for a shard that is not whole.
    """
    return tuple(_recheck_one(target, plan, job, store, watch, stored) for stored in job.rechecks)


def tolerance(job: Job) -> float:
    """The largest relative L2 distance of a row, captured again, from the stored one."""
    allowed = capture_tolerance(job.target.dtype, job.dtype)
    if job.codec == "int8o":
        allowed += _INT8_ROUNDING
    return allowed


def capture_tolerance(compute: str, rest: RestDtype) -> float:
    """The same for states in the type at rest that no codec has touched; types by name."""
    allowed = RELATIVE_L2[getattr(torch, compute)]
    return allowed + _BF16_ROUNDING if rest == "bfloat16" else allowed


def _recheck_one(
    target: Target, plan: CapturePlan, job: Job, store: Store, watch: IoWatch, stored: StoredSample
) -> Rechecked:
    with watch.call("read corpus", job.corpus):
        batch = batch_of(read_rows(job.corpus, stored.positions))
    found = target.start_capture(batch, plan, HostCopies(target.device)).wait()
    rows = slice(int(batch.offsets[stored.place]), int(batch.offsets[stored.place + 1]))
    sample_id = batch.sample_ids[stored.place]
    with _shard(store, stored.key, job, watch) as shard:
        with watch.call("read shard", f"{store.url}/{stored.key}"):
            shard.verify()
            kept = shard.read(stored.row)
        _require_same_sample(shard, kept, sample_id, batch.input_ids[rows], stored, job)
        return _compare(target, job, found, rows, kept, f"{stored.key}, sample {sample_id}")


def _require_same_sample(
    shard: Shard,
    kept: Features,
    sample_id: str,
    input_ids: torch.Tensor,
    stored: StoredSample,
    job: Job,
) -> None:
    if shard.fingerprint != job.fingerprint:
        raise ShardDamaged(
            f"{stored.key}: made by another extraction (fingerprint {shard.fingerprint}, here "
            f"{job.fingerprint}). Start the extraction again: it makes it anew."
        )
    if kept.tokens.sample_ids != (sample_id,) or not torch.equal(kept.tokens.input_ids, input_ids):
        raise DataError(
            f"{stored.key}: its sample {stored.row} is {kept.tokens.sample_ids[0]} with other "
            f"token ids than {sample_id} in {job.corpus}. Put the corpus back, or use a new run "
            "directory (`--run DIR`)."
        )


def _compare(
    target: Target, job: Job, found: Features, rows: slice, kept: Features, name: str
) -> Rechecked:
    pairs = [
        (f"tap {layer}", found.taps[rows, slot], kept.taps[:, slot])
        for slot, layer in enumerate(job.layer_ids)
    ]
    if found.last is not None and kept.last is not None:
        pairs.append(("the last hidden state", found.last[rows], kept.last))
    if all(torch.equal(new, old) for _, new, old in pairs):
        return Rechecked(kept.tokens.sample_ids[0], exact=True, relative_l2=0.0)
    allowed, furthest = tolerance(job), 0.0
    for what, new, old in pairs:
        away = relative_l2(new.float(), old.float())
        token = int(away.argmax())
        worst = float(away[token])
        furthest = max(furthest, worst)
        if not worst <= allowed:
            wrong = int((away > allowed).sum())
            raise TargetError(
                f"{name}: captured again, {what} is not what is stored: token {token} is "
                f"{worst:.3g} away (relative L2; {allowed:.2g} is allowed), {wrong} of "
                f"{len(away)} tokens differ. {_cause(target, job)} Put that back, or start over "
                "in a new run directory (`--run DIR`)."
            )
    return Rechecked(kept.tokens.sample_ids[0], exact=False, relative_l2=furthest)


def relative_l2(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """How far each row of [T, H] is from that of `old`, by its length; fp32 [T]."""
    away = (new - old).norm(dim=-1) / old.norm(dim=-1).clamp_min(1e-12)
    return away.nan_to_num(nan=torch.inf)


def _cause(target: Target, job: Job) -> str:
    """What is known to have changed since; what can have, where nothing is."""
    weights = (
        f"The weights are the same (their identity, {target.spec.identity}, is part of the "
        "fingerprint)"
    )
    if not job.made_with:
        return f"{weights}; what the stored states were made with is not recorded."
    changed = [
        f"{name} was {_shown(job.made_with, name)}, now {_shown(job.software, name)}"
        for name in sorted({*job.made_with, *job.software})
        if job.made_with.get(name) != job.software.get(name)
    ]
    if changed:
        return f"{weights}; what changed: {'; '.join(changed)}."
    return (
        f"{weights}, and versions, code and device are as they were: suspect a patch inside an "
        "installed package, another attention kernel, or the device itself."
    )


def _shown(software: Mapping[str, str], name: str) -> str:
    return software.get(name, "not recorded")


@contextmanager
def _shard(store: Store, key: str, job: Job, watch: IoWatch) -> Iterator[Shard]:
    if isinstance(store, LocalStore):
        with watch.call("read shard", store.path(key)):
            shard = Shard(store.path(key))
        yield shard
        return
    where = f"{store.url}/{key}"
    # A name of the kind that the next start, `stop` and `clean` take for a dead process's.
    folder = job.scratch or Path(tempfile.gettempdir())
    path = folder / f"recheck-{key.replace('/', '-')}.{os.getpid()}{PARTIAL}"
    try:
        with watch.call("read shard", where):
            stat = store.head(key)
        if stat is None:
            raise ShardDamaged(f"{where} is gone. Start the extraction again: it makes it anew.")
        with path.open("wb") as file:
            for start in range(0, stat.size, _BLOCK):
                with watch.call("read shard", where):
                    file.write(store.get_range(key, start, min(start + _BLOCK, stat.size)))
        yield Shard(path)
    finally:
        path.unlink(missing_ok=True)
