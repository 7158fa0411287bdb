import pytest
import torch

from paceline.recipe.schema import TargetRecipe
from paceline.target.capture import CapturePlan
from paceline.target.load import load_target
from paceline.target.transfer import HostCopies, to_device
from token_batches import random_batch

CPU = torch.device("cpu")


def test_on_the_cpu_a_copy_is_the_tensor_itself_and_is_counted():
    copies = HostCopies(CPU)
    buffers = [torch.randn(5), torch.randn(3, 2)]
    pending = [copies.start(buffer) for buffer in buffers]
    assert copies.count == 2
    for copy, buffer in zip(pending, buffers, strict=True):
        assert copy.wait() is buffer
        assert copy.wait() is buffer
    assert copies.count == 2
    assert to_device(buffers[0], CPU) is buffers[0]


@pytest.mark.gpu
def test_gpu_a_copy_is_pinned_whole_and_the_caller_s_to_keep():
    """Each buffer is filled by work that is queued, and freed at once: nobody may overtake."""
    device = torch.device("cuda:0")
    copies = HostCopies(device)
    kept = []
    pending = None
    for number in range(20):
        work = torch.full((2000, 2000), 1.0, device=device)
        for _ in range(5):
            work = work @ work / 2000.0
        buffer = (work + number).reshape(-1)
        following = copies.start(buffer)
        del buffer, work
        if pending is not None:
            kept.append(pending.wait())
        pending = following
    kept.append(pending.wait())
    assert copies.count == 20
    for number, host in enumerate(kept):
        assert host.device == CPU
        assert host.is_pinned()
        assert torch.equal(host, torch.full_like(host, 1.0 + number))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
@pytest.mark.parametrize("chunk_tokens", [None, 16])
def test_gpu_two_batches_at_a_time_are_those_of_one_by_one(kind, chunk_tokens, tiny_folder):
    target = load_target(TargetRecipe(path=str(tiny_folder(kind)), device="cuda:0"))
    batches = [random_batch([40, 3, 17], seed=seed) for seed in range(8)]
    plan = CapturePlan((1, 3), True, chunk_tokens, torch.bfloat16)
    alone = [target.start_capture(b, plan, HostCopies(target.device)).wait() for b in batches]
    copies = HostCopies(target.device)
    pending = [target.start_capture(batch, plan, copies) for batch in batches]
    assert copies.count == len(batches)
    for got, wanted in zip([p.wait() for p in pending], alone, strict=True):
        assert torch.equal(got.taps, wanted.taps)
        assert torch.equal(got.last, wanted.last)


@pytest.mark.gpu
def test_gpu_beginning_a_batch_does_not_wait_for_the_one_before(tiny_folder):
    target = load_target(TargetRecipe(path=str(tiny_folder("llama")), device="cuda:0"))
    plan, copies = CapturePlan((1, 3), True), HostCopies(target.device)
    target.start_capture(random_batch([40, 3, 17]), plan, copies).wait()
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second of the device's clock
    busy = torch.cuda.Event()
    busy.record()
    target.start_capture(random_batch([40, 3, 17]), plan, copies)
    assert not busy.query(), "start_capture waited for the device"
