"""What a recipe says of online training and of several drafters: judged by its words alone."""

import re
from collections.abc import Iterator

from paceline.recipe.schema import Recipe, TrainRecipe

_DEVICE = re.compile(r"cpu(:(0|[1-9]\d*))?|cuda:(0|[1-9]\d*)")


def capture_devices(recipe: Recipe) -> tuple[str, ...]:
    """Devices of the target's workers that capture while the drafter trains; none offline."""
    if not recipe.train.online:
        return ()
    return recipe.train.target_devices or (recipe.target.device,)


def training_devices(recipe: TrainRecipe) -> tuple[str, ...]:
    """Devices that drafters train on, one each."""
    return recipe.drafter_devices or (recipe.device,)


def has_velocity(recipe: TrainRecipe) -> bool:
    """Whether averages move the model with a momentum of their own, as large as the model."""
    is_plain = recipe.outer_learning_rate == 1.0 and recipe.outer_momentum == 0.0
    return bool(recipe.drafter_devices) and not is_plain


def is_on_cpu(device: str) -> bool:
    """Whether a device is the CPU: `cpu`, `cpu:1`."""
    return device.partition(":")[0] == "cpu"


def online_problems(recipe: Recipe) -> Iterator[str]:
    """Everything impossible in it, a sentence each."""
    train = recipe.train
    for key, devices in (
        ("train.target_devices", train.target_devices),
        ("train.drafter_devices", train.drafter_devices),
    ):
        for device in devices:
            if not _DEVICE.fullmatch(device):
                yield (
                    f'{key}: "{device}" is no device. Give cuda:0 (the number of the GPU), or '
                    "cpu:0 (CPUs are told apart by any number)."
                )
        twice = sorted({device for device in devices if devices.count(device) > 1})
        if twice:
            yield f"{key}: {', '.join(twice)} stands there more than once. Give each device once."
    if not train.online:
        return
    if recipe.corpus.validation_fraction == 0:
        yield (
            "train.online: the store keeps the validation samples alone, and "
            "corpus.validation_fraction 0 makes none, so nothing could be evaluated on. Use 0.05."
        )
    on_cpu = any(map(is_on_cpu, train.target_devices))
    if on_cpu and recipe.target.dtype == "float16":
        yield (
            "train.target_devices: target.dtype float16 does not run on a CPU. Use float32 or "
            "bfloat16."
        )


def online_notes(recipe: Recipe) -> Iterator[str]:
    """What is possible in it and may still surprise."""
    train = recipe.train
    if not train.online:
        if train.target_devices:
            yield "train.target_devices has no effect without train.online."
        if train.tee:
            yield "train.tee has no effect without train.online: the store has all samples."
        return
    if train.tee and train.epochs <= 1:
        yield "train.tee: of a single epoch nothing is read again. Leave it out."
    if train.shard_window is not None:
        yield (
            "train.shard_window has no effect with train.online: training samples are captured in "
            "a random order, and read from no shards."
        )
    drafters = training_devices(train)
    for device in capture_devices(recipe):
        if device in drafters and not is_on_cpu(device):
            yield (
                f"train.target_devices, train.drafter_devices: {device} does both, so target and "
                "drafter share its memory and its time. `paceline plan` says whether it holds both."
            )
