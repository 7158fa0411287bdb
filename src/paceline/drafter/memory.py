"""What the training of one drafter takes on its device: arithmetic, without torch.

A plan adds it up before the training, and the training compares it with what it measures. Weights,
states and buffers are exact; activations are estimates, and called so.
"""

from dataclasses import dataclass

from paceline.drafter.shape import DrafterShape
from paceline.recipe.objective_inputs import chunk_copies, needs_all_tokens
from paceline.recipe.online import has_velocity, is_on_cpu, training_devices
from paceline.recipe.schema import TrainRecipe
from paceline.recipe.training import resolved_compute

PROCESS_BYTES = 400_000_000
"""A Python process that has loaded torch and Transformers; a little more than was measured."""

CUDA_CONTEXT_BYTES = 800_000_000
"""About what CUDA's context, its libraries' workspaces and torch's rounding take on a device."""

_ITEM_BYTES = {"float32": 4, "bfloat16": 2}

_GROUP_ROWS = 256
"""Of drafter/attention.py."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One thing that takes memory."""

    name: str
    bytes: int | None
    """None where it cannot be known."""
    is_estimate: bool = False


def lasting_parts(train: TrainRecipe, drafter: DrafterShape, *, is_tied: bool) -> list[Part]:
    """What is there between two steps; `is_tied` is whether the target's two ends are one."""
    item = _compute_bytes(train)
    frozen = drafter.frozen_parameters(is_tied=is_tied)
    if needs_all_tokens(train) and drafter.draft_vocab_size is not None and not is_tied:
        # The rows that are not proposed are kept beside those that are.
        frozen += drafter.vocab_size * drafter.hidden_size
    moments = "Muon's momentum" if train.optimizer == "muon" else "AdamW moments"
    return [
        Part(name="drafter weights", bytes=4 * drafter.parameters),
        Part(name=moments, bytes=drafter.moment_bytes(train.optimizer)),
        Part(name="embedding and lm_head", bytes=item * frozen),
        Part(name="weights in bfloat16", bytes=2 * drafter.parameters if item == 2 else 0),
        # The mean of several drafters passes through the CPU, one tensor at a time.
        Part(name="averaging", bytes=0),
    ]


def step_parts(train: TrainRecipe, drafter: DrafterShape, longest: int) -> list[Part]:
    """What a step has beside it; `longest` is the context of the longest sample."""
    _, slots = micro_batch(train, drafter, longest)
    backward = slots * (3 * drafter.intermediate_size + 2 * drafter.hidden_size)
    return [
        Part(name="gradients", bytes=4 * drafter.parameters),
        Part(name="activations", bytes=training_bytes(train, drafter, longest), is_estimate=True),
        Part(name="backward", bytes=backward * _compute_bytes(train), is_estimate=True),
        Part(name="logits", bytes=logits_bytes(train, drafter, longest)),
    ]


def writing_bytes(train: TrainRecipe, drafter: DrafterShape, longest: int, *, device: str) -> int:
    """What writing a checkpoint takes on the host beside the training on `device`.

    The optimizer's state stands in memory once as tensors of the file, once as its bytes; on a CPU
    it takes the room that a step has left.
    """
    size = 2 * drafter.moment_bytes(train.optimizer)
    if not is_on_cpu(device):
        return size
    return max(0, size - sum(part.bytes or 0 for part in step_parts(train, drafter, longest)))


def checkpoint_bytes(train: TrainRecipe, drafter: DrafterShape) -> int:
    """Of one checkpoint on the disk."""
    return drafter.checkpoint_of(
        len(training_devices(train)), has_velocity=has_velocity(train), optimizer=train.optimizer
    )


def unaveraged_bytes(train: TrainRecipe, drafter: DrafterShape) -> int:
    """What one has beside it until it is averaged: each drafter's weights and those before."""
    return (len(train.drafter_devices) + 1) * drafter.weight_bytes if train.drafter_devices else 0


def averaging_bytes(train: TrainRecipe, drafter: DrafterShape) -> int:
    """What averaging several drafters takes on the host.

    The model, what each drafter has, and the bytes of one of them on the way to the disk.
    """
    held = len(train.drafter_devices) + 2 + has_velocity(train)
    return 4 * held * drafter.parameters


def micro_batch(train: TrainRecipe, drafter: DrafterShape, longest: int) -> tuple[int, int]:
    """Context tokens and slots of the largest micro-batch: one long sample, or many short ones.

    A sample alone may exceed `train.micro_batch_tokens`; those of a step may not fill it.
    """
    block, limit = drafter.block_size, train.micro_batch_tokens
    slots = min(train.anchors, max(1, longest - 1)) * block
    if longest + slots >= limit:
        return longest, slots
    step = train.batch_samples * longest, train.batch_samples * slots
    if sum(step) <= limit:
        return step
    slots = limit * block // (block + 1)
    return limit - slots, slots


def training_bytes(train: TrainRecipe, drafter: DrafterShape, longest: int) -> int:
    """What the drafter's forward pass keeps for the backward one.

    Counted on the modules: norms, rotations and what goes into attention are fp32, products are in
    the compute type. Fused kernels keep a little less.
    """
    item = _compute_bytes(train)
    context, slots = micro_batch(train, drafter, longest)
    hidden, inner = drafter.hidden_size, drafter.intermediate_size
    queries = drafter.num_heads * drafter.head_dim
    keys = drafter.num_kv_heads * drafter.head_dim
    slot = item * (4 * inner + 5 * hidden // 2 + queries)
    slot += 4 * (9 * hidden // 2 + 3 * queries + 4 * keys)
    once = context * (item * (drafter.num_taps + 1) + 4 * 2) * hidden
    rows = slots * slot + context * 4 * 4 * keys
    return drafter.num_layers * rows + once + _scores_bytes(train, drafter, context, slots)


def _compute_bytes(train: TrainRecipe) -> int:
    return _ITEM_BYTES[resolved_compute(train)]


def _scores_bytes(train: TrainRecipe, drafter: DrafterShape, context: int, slots: int) -> int:
    """Attention's probabilities, which only the reference on the CPU keeps.

    Anchors lie all over a sample, and blocks are taken in groups of rows that see what the last
    one sees.
    """
    if not is_on_cpu(training_devices(train)[0]):
        return 0
    rows = drafter.block_size * (drafter.num_heads // drafter.num_kv_heads)
    blocks = max(1, slots // drafter.block_size)
    groups = -(-blocks // max(1, _GROUP_ROWS // rows))
    seen = context * (groups + 1) // (2 * groups) + drafter.block_size
    return 4 * drafter.num_layers * slots * drafter.num_heads * seen


def logits_bytes(train: TrainRecipe, drafter: DrafterShape, longest: int) -> int:
    """A chunk of logits, and as much for each distribution that the loss compares.

    4 bytes each, 4 more beside a narrower head, and at least one row's.
    """
    _, slots = micro_batch(train, drafter, longest)
    rows = max(1, min(train.loss_chunk // drafter.num_proposed, slots))
    each = 4 * chunk_copies(train) + (0 if _compute_bytes(train) == 4 else 4)
    return rows * drafter.num_proposed * each
