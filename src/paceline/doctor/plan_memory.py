"""Memory of each stage, on its device and on the host: arithmetic over the parts that count.

Weights, states and buffers are exact; activations and overheads are estimates, and called so.
"""

from dataclasses import dataclass, replace
from typing import Literal

from paceline.doctor.plan_bytes import Samples, StoreSizes
from paceline.doctor.plan_target import DrafterShape, TargetSizes
from paceline.recipe.schema import Recipe
from paceline.recipe.training import resolved_compute
from paceline.target.families import LayerKind
from paceline.target.spec import TargetSpec

Where = Literal["device", "host"]

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

PROCESS_BYTES = 400_000_000
"""A Python process that has loaded torch and Transformers; a little more than was measured."""

CUDA_HOST_BYTES = 2_000_000_000
"""About what such a process takes on the host once it uses a GPU."""

CUDA_CONTEXT_BYTES = 800_000_000
"""About what CUDA's context, its libraries' workspaces and torch's rounding take on a device."""

_GROUP_ROWS = 256
"""Of drafter/attention.py."""

QUEUE_BYTES = 256 << 20
"""Features that wait for the trainer (train/source.py); most of them lie in the page cache."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One thing that takes memory."""

    name: str
    bytes: int | None
    """None where it cannot be known."""
    is_estimate: bool = False


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """What a stage has in memory at a time, at most."""

    stage: str
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
    store: StoreSizes


def memory(
    recipe: Recipe, sizes: Sizes, *, staging_bytes: int = 0, files_in_memory: int = 0
) -> tuple[StageMemory, ...]:
    """The stages that need much, in order; they never run side by side.

    `staging_bytes` is the budget of a staging that lies in memory, `files_in_memory` what else
    the run writes to such a file system. What the page cache holds is not counted: the system
    takes it back.
    """
    stages = [_regenerate(recipe, sizes)] if recipe.regenerate.enabled else []
    stages += [
        _extract(recipe, sizes, staging_bytes),
        _train(recipe, sizes),
        _score(recipe, sizes),
    ]
    if not files_in_memory:
        return tuple(stages)
    files = Part(name="files in memory", bytes=files_in_memory, is_estimate=True)
    return tuple(replace(stage, on_host=(*stage.on_host, files)) for stage in stages)


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


def _extract(recipe: Recipe, sizes: Sizes, staging_bytes: int) -> StageMemory:
    spec, item = sizes.target.spec, ITEM_BYTES[recipe.target.dtype]
    tokens = min(max(recipe.extract.batch_tokens, sizes.samples.longest), sizes.samples.tokens)
    parts = [
        _weights(recipe, sizes),
        Part(name="activations", bytes=_forward_bytes(spec, tokens, item), is_estimate=True),
        # The next batch begins while the last one's states are on their way to the host.
        Part(name="capture buffers", bytes=2 * tokens * sizes.store.bytes_per_token),
    ]
    chunk = recipe.extract.chunk_tokens
    if chunk is not None and chunk < sizes.samples.longest:
        deepest = None if sizes.store.last else sizes.store.taps[-1] + 1
        cache = _cache_bytes(spec, tokens, item, layers=deepest)
        parts.append(Part(name="keys and values", bytes=cache))
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


def _train(recipe: Recipe, sizes: Sizes) -> StageMemory:
    drafter = sizes.drafter
    item, longest = _compute_bytes(recipe), sizes.samples.longest
    _, slots = micro_batch(recipe, drafter, longest)
    is_shared = sizes.target.spec.tie_word_embeddings and drafter.draft_vocab_size is None
    rows = drafter.vocab_size + (0 if is_shared else drafter.num_proposed)
    parameters = drafter.parameters
    for_a_step = [
        Part(name="gradients", bytes=4 * parameters),
        Part(name="activations", bytes=training_bytes(recipe, drafter, longest), is_estimate=True),
        Part(
            name="backward",
            bytes=slots * item * (3 * drafter.intermediate_size + 2 * drafter.hidden_size),
            is_estimate=True,
        ),
        Part(name="logits", bytes=logits_bytes(recipe, drafter, longest)),
    ]
    parts = [
        Part(name="drafter weights", bytes=4 * parameters),
        Part(name="AdamW moments", bytes=8 * parameters),
        Part(name="embedding and lm_head", bytes=item * drafter.hidden_size * rows),
        Part(name="weights in bfloat16", bytes=2 * parameters if item == 2 else 0),
        *for_a_step,
        # The mean of several drafters passes through the CPU, one tensor at a time.
        Part(name="averaging", bytes=0),
    ]
    # The optimizer's state stands in memory once as tensors of the file, once as its bytes; on a
    # CPU it takes the room that a step has left.
    writing = 16 * parameters
    if recipe.train.device == "cpu":
        writing = max(0, writing - sum(part.bytes or 0 for part in for_a_step))
    more = (
        Part(name="a checkpoint's bytes", bytes=writing, is_estimate=True),
        Part(name="features that wait", bytes=QUEUE_BYTES, is_estimate=True),
    )
    return _placed("train", recipe.train.device, parts, more=more)


def micro_batch(recipe: Recipe, drafter: DrafterShape, longest: int) -> tuple[int, int]:
    """Context tokens and slots of the largest micro-batch: one long sample, or many short ones.

    A sample alone may exceed `train.micro_batch_tokens`.
    """
    block, limit = drafter.block_size, recipe.train.micro_batch_tokens
    slots = min(recipe.train.anchors, max(1, longest - 1)) * block
    if longest + slots >= limit:
        return longest, slots
    slots = limit * block // (block + 1)
    return limit - slots, slots


def training_bytes(recipe: Recipe, drafter: DrafterShape, longest: int) -> int:
    """What the drafter's forward pass keeps for the backward one.

    Counted on the modules: norms, rotations and what goes into attention are fp32, products are in
    the compute type. Fused kernels keep a little less.
    """
    item = _compute_bytes(recipe)
    context, slots = micro_batch(recipe, drafter, longest)
    hidden, inner = drafter.hidden_size, drafter.intermediate_size
    queries = drafter.num_heads * drafter.head_dim
    keys = drafter.num_kv_heads * drafter.head_dim
    slot = item * (4 * inner + 5 * hidden // 2 + queries)
    slot += 4 * (9 * hidden // 2 + 3 * queries + 4 * keys)
    once = context * (item * (drafter.num_taps + 1) + 4 * 2) * hidden
    rows = slots * slot + context * 4 * 4 * keys
    return drafter.num_layers * rows + once + _scores_bytes(recipe, drafter, context, slots)


def _compute_bytes(recipe: Recipe) -> int:
    return ITEM_BYTES[resolved_compute(recipe.train)]


def _scores_bytes(recipe: Recipe, drafter: DrafterShape, context: int, slots: int) -> int:
    """Attention's probabilities, which only the reference on the CPU keeps.

    Anchors lie all over a sample, and blocks are taken in groups of rows that see what the last
    one sees.
    """
    if recipe.train.device != "cpu":
        return 0
    rows = drafter.block_size * (drafter.num_heads // drafter.num_kv_heads)
    blocks = max(1, slots // drafter.block_size)
    groups = -(-blocks // max(1, _GROUP_ROWS // rows))
    seen = context * (groups + 1) // (2 * groups) + drafter.block_size
    return 4 * drafter.num_layers * slots * drafter.num_heads * seen


def logits_bytes(recipe: Recipe, drafter: DrafterShape, longest: int) -> int:
    """A chunk of logits: 4 bytes each, 8 beside a narrower head, and at least one row's."""
    _, slots = micro_batch(recipe, drafter, longest)
    rows = max(1, min(recipe.train.loss_chunk // drafter.num_proposed, slots))
    return rows * drafter.num_proposed * (4 if _compute_bytes(recipe) == 4 else 8)


def _score(recipe: Recipe, sizes: Sizes) -> StageMemory:
    spec, item = sizes.target.spec, ITEM_BYTES[recipe.target.dtype]
    tree = max((*recipe.score.budgets, *recipe.score.walk_budgets, 1))
    length = recipe.corpus.max_length + recipe.score.max_new_tokens
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
