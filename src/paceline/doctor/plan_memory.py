"""Memory of each stage, on its device and on the host: arithmetic over the parts that count.

Weights, states and buffers are exact; activations and overheads are estimates, and called so.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

from paceline.doctor.plan_bytes import Samples, StoreSizes
from paceline.doctor.plan_target import TargetSizes
from paceline.drafter.memory import (
    CUDA_CONTEXT_BYTES,
    PROCESS_BYTES,
    Part,
    averaging_bytes,
    lasting_parts,
    step_parts,
    writing_bytes,
)
from paceline.drafter.shape import DrafterShape
from paceline.recipe.online import (
    capture_devices,
    is_on_cpu,
    training_devices,
)
from paceline.recipe.schema import Recipe
from paceline.recipe.score_inputs import score_settings
from paceline.target.families import LayerKind
from paceline.target.spec import TargetSpec

Where = Literal["device", "host"]

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

CUDA_HOST_BYTES = 2_000_000_000
"""About what such a process takes on the host once it uses a GPU."""


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """What a stage has in memory at a time, at most."""

    stage: str
    """`capture` is the targets' part of an online training, which runs beside `train`."""
    device: str
    """`cpu` or `cuda:0`; of several, each."""
    on_device: tuple[Part, ...]
    """Empty where the device is the CPU: all of it is host memory."""
    on_host: tuple[Part, ...]

    def total(self, where: Where) -> int:
        """The sum of what is known."""
        parts = self.on_device if where == "device" else self.on_host
        return sum(part.bytes or 0 for part in parts)

    def unknown(self, where: Where) -> tuple[str, ...]:
        """Names of the parts that are not in the sum."""
        parts = self.on_device if where == "device" else self.on_host
        return tuple(part.name for part in parts if part.bytes is None)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the memory follows from, beside the recipe."""

    target: TargetSizes
    drafter: DrafterShape
    samples: Samples
    """Those in the store."""
    trained: Samples
    """Those trained on; the same ones where all of them are in the store."""
    store: StoreSizes


def memory(
    recipe: Recipe, sizes: Sizes, *, staging_bytes: int = 0, files_in_memory: int = 0
) -> tuple[StageMemory, ...]:
    """The stages that need much, in order; they never run side by side.

    What both sides of an online training need of the host stands in `train`.

    `staging_bytes` is the budget of a staging that lies in memory, `files_in_memory` what else the
    run writes to such a file system. What the page cache holds is not counted: the system takes it
    back.
    """
    asked = recipe.regenerate
    stages = [_regenerate(recipe, sizes)] if asked.enabled and not asked.servers else []
    stages += [
        _extract(recipe, sizes, staging_bytes),
        *_train(recipe, sizes),
        _score(recipe, sizes),
    ]
    if not files_in_memory:
        return tuple(stages)
    files = Part(name="files in memory", bytes=files_in_memory, is_estimate=True)
    return tuple(
        replace(stage, on_host=(*stage.on_host, files)) if stage.on_host else stage
        for stage in stages
    )


def _placed(
    stage: str,
    device: str,
    parts: list[Part],
    *,
    on_each: int = 1,
    processes: int = 1,
    more: tuple[Part, ...] = (),
) -> StageMemory:
    """A stage of `processes`, `on_each` of them on each of its devices, with these parts each."""
    each = tuple(_times(part, on_each) for part in parts)
    if device == "cpu":
        base = Part(name="processes", bytes=processes * PROCESS_BYTES, is_estimate=True)
        return StageMemory(stage=stage, device=device, on_device=(), on_host=(*each, *more, base))
    context = Part(name="CUDA context", bytes=on_each * CUDA_CONTEXT_BYTES, is_estimate=True)
    base = Part(name="processes", bytes=processes * CUDA_HOST_BYTES, is_estimate=True)
    return StageMemory(
        stage=stage, device=device, on_device=(*each, context), on_host=(*more, base)
    )


def _times(part: Part, count: int) -> Part:
    size = None if part.bytes is None else part.bytes * count
    return Part(name=part.name, bytes=size, is_estimate=part.is_estimate)


def _weights(recipe: Recipe, sizes: Sizes) -> Part:
    numbers = sizes.target.weights
    item = ITEM_BYTES[recipe.target.dtype]
    return Part(name="target weights", bytes=None if numbers is None else numbers * item)


def _forward_bytes(spec: TargetSpec, tokens: int, item: int) -> int:
    """Activations of the target's forward pass over `tokens`, the widest layer's at their peak.

    The residual stream, its norm (in fp32 for a moment), and either the gated product of the
    MLP or queries, keys, values and their mix, rotated copies included.
    """
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    mixing = max(3 * spec.intermediate_size, 4 * queries + 4 * keys)
    return tokens * (item * (2 * spec.hidden_size + mixing) + 4 * 2 * spec.hidden_size)


def _cache_bytes(spec: TargetSpec, tokens: int, item: int, *, layers: int | None = None) -> int:
    """Keys and values of `tokens` in all layers that keep them."""
    kinds = spec.layer_kinds[:layers]
    keeping = sum(kind is not LayerKind.LINEAR for kind in kinds)
    return 2 * keeping * spec.num_kv_heads * spec.head_dim * tokens * item


def _regenerate(recipe: Recipe, sizes: Sizes) -> StageMemory:
    spec, item = sizes.target.spec, ITEM_BYTES[recipe.target.dtype]
    group, longest = recipe.regenerate.group_size, recipe.corpus.max_length
    prompts = group * max(1, longest - recipe.regenerate.max_new_tokens)
    parts = [
        _weights(recipe, sizes),
        Part(name="keys and values", bytes=_cache_bytes(spec, group * longest, item)),
        Part(name="activations", bytes=_forward_bytes(spec, prompts, item), is_estimate=True),
        Part(name="logits", bytes=2 * 4 * group * spec.vocab_size, is_estimate=True),
    ]
    workers = recipe.target.workers
    return _placed("regenerate", recipe.target.device, parts, on_each=workers, processes=workers)


def _batch_tokens(recipe: Recipe, samples: Samples) -> int:
    """The most of one forward pass of the target over `samples`."""
    return min(max(recipe.extract.batch_tokens, samples.longest), samples.tokens)


def _capture_parts(
    recipe: Recipe, sizes: Sizes, samples: Samples, *, forward: str = "activations"
) -> list[Part]:
    """A process that captures `samples`; `forward` names what its forward pass takes."""
    spec, item = sizes.target.spec, ITEM_BYTES[recipe.target.dtype]
    tokens = _batch_tokens(recipe, samples)
    parts = [
        _weights(recipe, sizes),
        Part(name=forward, bytes=_forward_bytes(spec, tokens, item), is_estimate=True),
        # The next batch begins while the last one's states are on their way to the host.
        Part(name="capture buffers", bytes=2 * tokens * sizes.store.bytes_per_token),
    ]
    chunk = recipe.extract.chunk_tokens
    if chunk is not None and chunk < samples.longest:
        deepest = None if sizes.store.last else sizes.store.taps[-1] + 1
        cache = _cache_bytes(spec, tokens, item, layers=deepest)
        parts.append(Part(name="keys and values", bytes=cache))
    return parts


def _extract(recipe: Recipe, sizes: Sizes, staging_bytes: int) -> StageMemory:
    parts = _capture_parts(recipe, sizes, sizes.samples)
    devices, workers = recipe.target.devices, recipe.target.workers
    processes = len(devices) if devices else workers
    # A shard's states, and the bytes that they are written as.
    shards = Part(name="shards in work", bytes=2 * processes * sizes.store.largest_shard)
    staging = Part(name="staging in memory", bytes=staging_bytes)
    return _placed(
        "extract",
        ", ".join(f"cuda:{number}" for number in devices) or recipe.target.device,
        parts,
        on_each=1 if devices else workers,
        processes=processes,
        more=(shards, staging) if staging_bytes else (shards,),
    )


def _train(recipe: Recipe, sizes: Sizes) -> list[StageMemory]:
    """GPUs that do the same together; the first of `train` has what all need of the host."""
    targets, drafters = capture_devices(recipe), training_devices(recipe.train)
    capture = []
    if targets:
        # On a device that does both, the drafter has activations of its own.
        capture = _capture_parts(recipe, sizes, sizes.trained, forward="target's activations")
    is_tied = sizes.target.spec.tie_word_embeddings
    drafting = [
        *lasting_parts(recipe.train, sizes.drafter, is_tied=is_tied),
        *step_parts(recipe.train, sizes.drafter, sizes.trained.longest),
    ]
    doing: dict[tuple[bool, bool], list[str]] = {}
    for device in dict.fromkeys((*drafters, *targets)):
        if not is_on_cpu(device):
            doing.setdefault((device in drafters, device in targets), []).append(device)
    host = _train_host(recipe, sizes, capture, drafting)
    stages = []
    if not any(is_drafter for is_drafter, _ in doing):
        stages.append(StageMemory(stage="train", device="cpu", on_device=(), on_host=host))
        host = ()
    for (is_drafter, is_target), devices in doing.items():
        # Both sides have a process of their own there.
        context = (is_drafter + is_target) * CUDA_CONTEXT_BYTES
        parts = (*(drafting if is_drafter else ()), *(capture if is_target else ()))
        stages.append(
            StageMemory(
                stage="train" if is_drafter else "capture",
                device=", ".join(devices),
                on_device=(*parts, Part(name="CUDA context", bytes=context, is_estimate=True)),
                on_host=host if is_drafter else (),
            )
        )
        host = () if is_drafter else host
    return stages


def _train_host(
    recipe: Recipe, sizes: Sizes, capture: list[Part], drafting: list[Part]
) -> tuple[Part, ...]:
    train = recipe.train
    targets, drafters = capture_devices(recipe), training_devices(train)
    on_cpu = sum(map(is_on_cpu, drafters))
    longest = sizes.trained.longest
    writing = sum(writing_bytes(train, sizes.drafter, longest, device=d) for d in drafters)
    parts = [
        *(_times(part, on_cpu) for part in drafting if on_cpu),
        *(_times(part, n) for part in capture if (n := sum(map(is_on_cpu, targets)))),
        Part(name="a checkpoint's bytes", bytes=writing, is_estimate=True),
    ]
    # Those of a store are mapped, and the same ones come again in each epoch.
    all_of_it = sizes.trained.tokens * sizes.store.bytes_per_token
    # Online, samples of later epochs wait beside the same of this one.
    most = math.ceil(train.epochs) * all_of_it if targets else sizes.store.total
    queue = min(train.queue_bytes, most)
    parts.append(Part(name="features that wait", bytes=queue, is_estimate=True))
    if targets:
        # A batch waits for room while the next one is computed.
        tokens = _batch_tokens(recipe, sizes.trained)
        size = 2 * len(targets) * tokens * sizes.store.bytes_per_token
        parts.append(Part(name="features on their way", bytes=size, is_estimate=True))
    if targets and train.tee:
        # A shard that is written is copied once more, behind each other.
        size = min(2 * recipe.extract.shard_bytes + train.queue_bytes, 2 * all_of_it)
        parts.append(Part(name="features to be kept", bytes=size, is_estimate=True))
    if train.drafter_devices:
        mean = averaging_bytes(train, sizes.drafter)
        parts.append(Part(name="averaging on the host", bytes=mean, is_estimate=True))
    workers = (*targets, *(train.drafter_devices or (train.device,)))
    processes = sum(PROCESS_BYTES if is_on_cpu(d) else CUDA_HOST_BYTES for d in workers)
    processes += PROCESS_BYTES if train.drafter_devices else 0
    return (*parts, Part(name="processes", bytes=processes, is_estimate=True))


def _score(recipe: Recipe, sizes: Sizes) -> StageMemory:
    spec, item = sizes.target.spec, ITEM_BYTES[recipe.target.dtype]
    tree = max((*recipe.score.budgets, *recipe.score.walk_budgets, 1))
    length = recipe.corpus.max_length + score_settings(recipe.score).max_new_tokens
    parts = [
        _weights(recipe, sizes),
        Part(name="drafter weights", bytes=4 * sizes.drafter.parameters),
        Part(name="keys and values", bytes=_cache_bytes(spec, length, item)),
        Part(
            name="activations",
            bytes=_forward_bytes(spec, recipe.corpus.max_length, item)
            + 2 * 4 * (tree + 1) * spec.vocab_size,
            is_estimate=True,
        ),
    ]
    workers = recipe.target.workers
    return _placed("score", recipe.target.device, parts, on_each=workers, processes=workers)
