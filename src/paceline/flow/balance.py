"""Whether targets and drafters keep pace with each other, and how devices are split among them."""

TELLING = 0.1
"""Share of its time that a side may wait before it is worth a sentence."""


def training_time(targets: float, drafters: float, captured: float = 1.0) -> float:
    """Seconds for a token of an online training, whose sides reach so many tokens per second.

    `captured` is the share of its tokens that the targets have to make, 0 to 1: over these the
    slower side decides, and the drafters alone over what is kept.
    """
    return captured / min(targets, drafters) + (1.0 - captured) / drafters


def split_devices(
    target_rate: float, drafter_rate: float, devices: int, captured: float = 1.0
) -> tuple[int, int]:
    """How many of `devices` alike run the target and how many drafters, at least one each.

    The rates are tokens per second of one that never waits, `captured` as of `training_time`: the
    split is the one in which that is least. Of two such splits the one with more targets is taken:
    the same tokens with fewer drafters are fewer weights to keep one model.

    Raises ValueError for fewer than two devices and for rates that are not above 0.
    """
    if devices < 2 or not (target_rate > 0 and drafter_rate > 0):
        raise ValueError(
            f"split_devices: {devices} devices at rates {target_rate} and {drafter_rate}"
        )

    def seconds(targets: int) -> float:
        drafters = devices - targets
        return training_time(targets * target_rate, drafters * drafter_rate, captured)

    targets = min(range(1, devices), key=lambda n: (seconds(n), -n))
    return targets, devices - targets


def starvation(
    lease_wait_share: float, put_wait_share: float, *, targets: int, drafters: int
) -> str | None:
    """Which side waits for the other, and what helps; None where neither does for long.

    `lease_wait_share` is the share of their time, 0 to 1, that drafters wait for hidden states;
    `put_wait_share` the share that targets wait for room in the queue.
    """
    if min(lease_wait_share, put_wait_share) >= TELLING:
        return (
            f"drafters wait {_percent(lease_wait_share)} of the time and targets "
            f"{_percent(put_wait_share)}: neither is too slow, but the queue does not carry one "
            "over the other's pauses; raise train.queue_bytes"
        )
    if lease_wait_share >= TELLING:
        said = f"{_waits('drafter', drafters)} {_percent(lease_wait_share)} of the time"
        return f"{said}: {_advice(lease_wait_share, drafters, 'target')}"
    if put_wait_share >= TELLING:
        said = f"{_waits('target', targets)} {_percent(put_wait_share)} of the time"
        return f"{said}: {_advice(put_wait_share, targets, 'drafter')}"
    return None


def _advice(share: float, idle: int, slow: str) -> str:
    # One of n that wait a share s of their time can go where the other n - 1 do the same work.
    if idle > 1 and share > 1 / idle:
        return f"move one device to the {slow}s"
    key = "extract.batch_tokens" if slow == "target" else "train.micro_batch_tokens"
    return f"add a device to train.{slow}_devices, or raise {key} if its devices have the memory"


def _waits(side: str, count: int) -> str:
    return f"the {side} waits" if count == 1 else f"{side}s wait"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
