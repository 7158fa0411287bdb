"""A plan in words: the rows of one table, and the lines under it."""

import time
from collections.abc import Iterator
from pathlib import Path

from paceline.doctor.plan import Plan
from paceline.doctor.plan_averaging import averaging_lines
from paceline.doctor.plan_online import online_lines, online_rows
from paceline.doctor.plan_verdicts import Verdict, device_name, host_name
from paceline.drafter.memory import Part
from paceline.watch.words import bytes_text, counted, duration, number, short_bytes

Row = tuple[str, str, str, str]

COLUMNS: Row = ("what", "needs", "there is", "fits")

_FITS = {True: "yes", False: "NO", None: "unknown"}


def rows(plan: Plan) -> Iterator[Row]:
    """The table: sizes first, then what must fit, then the time."""
    store, samples, done = plan.store, plan.samples, plan.done
    yield ("samples", f"{samples.count:,}", f"{done.samples:,}" if done.samples else "", "")
    yield ("tokens", number(samples.tokens), number(done.tokens) if done.tokens else "", "")
    yield ("a token", f"{store.bytes_per_token:,} B", "", "")
    yield ("a sample", bytes_text(store.bytes_per_sample), "", "")
    for codec, size in store.by_codec.items():
        chosen = " (chosen)" if codec == store.codec else ""
        yield (f"all, codec {codec}{chosen}", bytes_text(size), "", "")
    shards = counted(store.shards, "shard")
    yield (f"largest of {shards}, at most", bytes_text(store.largest_shard), "", "")
    for verdict in _shown(plan.verdicts):
        yield _verdict_row(verdict)
    flow = plan.flow
    rate = flow.tokens_per_s.value
    yield ("devices", "unknown" if rate is None else f"{number(rate)} tokens/s", "", "")
    if flow.upload is not None:
        speed = flow.upload.value
        yield ("upload", "unknown" if speed is None else f"{short_bytes(speed)}/s", "", "")
    took = "unknown" if flow.seconds is None else duration(flow.seconds)
    yield ("time to extract", took, "", "")
    yield from online_rows(plan.online)


def _shown(verdicts: tuple[Verdict, ...]) -> Iterator[Verdict]:
    """All but the stages that need less of the host than another one that fits as well."""
    host = [v for v in verdicts if v.name.startswith("memory in ")]
    most = max(host, key=lambda v: v.needs, default=None)
    for verdict in verdicts:
        if verdict not in host or verdict is most or verdict.fits is False:
            yield verdict


def _verdict_row(verdict: Verdict) -> Row:
    has = "unknown" if verdict.has is None else bytes_text(verdict.has)
    return (verdict.name, bytes_text(verdict.needs), has, _FITS[verdict.fits])


def lines(plan: Plan) -> Iterator[str]:
    """What does not fit into the table: what is short, what is unknown, of what numbers are."""
    for verdict in plan.verdicts:
        if verdict.fits is False:
            yield _short(verdict)
    for sentence in plan.unknown:
        yield f"unknown: {sentence.rstrip('.')}."
    yield f"samples: {plan.samples.said}."
    done = plan.done
    if done.shards:
        yield (
            f"done: {done.shards:,} of {counted(plan.store.shards, 'shard')} are verified, "
            f"{short_bytes(done.bytes)}; the time is that of the others."
        )
    yield from _time(plan)
    yield from online_lines(plan.online)
    drafter = plan.drafter
    yield (
        f"drafter: {drafter.parameters:,} parameters are trained, {drafter.fc_parameters:,} of "
        f"them fc; frozen: lm_head {drafter.lm_head_parameters:,}, with the embedding "
        f"{drafter.frozen_parameters:,}."
    )
    yield from averaging_lines(plan.averaging)
    for system in plan.file_systems:
        named = ", ".join(
            f"{place.what} {'about ' if place.is_estimate else ''}{short_bytes(place.needs)}"
            for place in system.places
        )
        yield f"disk {system.point}: {named}; {short_bytes(system.free)} free."
    for stage in plan.memory:
        for name, parts in (
            (device_name(stage), stage.on_device),
            (host_name(stage), stage.on_host),
        ):
            if parts:
                yield f"{name}: {', '.join(_part(part) for part in parts if _is_worth(part))}."
    if plan.target_in_memory and plan.target_bytes is not None:
        yield (
            f"memory: the target lies in memory, where its {short_bytes(plan.target_bytes)} are "
            "taken already; what there is is without them."
        )


def _is_worth(part: Part) -> bool:
    """Whether a part is named: those that take nothing are not, but for one that people expect."""
    return part.bytes != 0 or part.name == "averaging"


def _part(part: Part) -> str:
    if part.bytes is None:
        return f"{part.name} unknown"
    return f"{part.name} {'about ' if part.is_estimate else ''}{short_bytes(part.bytes)}"


def _time(plan: Plan) -> Iterator[str]:
    flow, staging = plan.flow, plan.staging
    if flow.tokens_per_s.value is not None:
        yield f"devices: {flow.tokens_per_s.said}."
    if flow.upload is not None and flow.upload.value is not None:
        yield f"upload: {flow.upload.said}."
    if plan.done.tokens >= plan.samples.tokens:
        yield "time: nothing is left to extract."
    elif staging is not None and staging.limit < staging.smallest:
        yield "time: nothing passes through a staging that is too small."
    elif flow.ends_at is not None:
        ends = time.strftime("%Y-%m-%d %H:%M", time.localtime(flow.ends_at))
        yield f"time: the {flow.bottleneck} is the bottleneck; begun now, it ends {ends}."
    elif flow.at_least is not None:
        yield f"time: at least {duration(flow.at_least)}, by the speed that is known."
    if flow.made is not None and flow.upload is not None and flow.upload.value is None:
        yield f"upload: keeps up with the devices from {short_bytes(flow.made)}/s on."
    if staging is None:
        return
    where = f"{staging.path}{' (memory)' if staging.is_memory else ''}"
    yield (
        f"staging: {where}, up to {short_bytes(staging.limit)}; works from "
        f"{short_bytes(staging.smallest)}, without waiting from {short_bytes(staging.smooth)}."
    )
    if flow.staging_fills_after is not None:
        yield f"staging: full after {duration(flow.staging_fills_after)}; the devices wait then."
    if flow.staging_lasts:
        yield f"staging: the work goes on for {duration(flow.staging_lasts)} without the store."


def _short(verdict: Verdict) -> str:
    short = "" if verdict.has is None else f", {short_bytes(verdict.needs - verdict.has)} short"
    said = f" ({verdict.said})" if verdict.said else ""
    would = f" Would fit: {'; or '.join(verdict.advice)}." if verdict.advice else ""
    return f"does not fit: {verdict.name}{short}{said}.{would}"


def title(plan: Plan, recipe: Path | None) -> str:
    """The first line."""
    name = "" if recipe is None else f" of {recipe}"
    return f"plan{name} for {plan.run}: {'it fits' if plan.fits else 'it does not fit'}"
