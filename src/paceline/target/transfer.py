"""Bytes between host and device: one copy to the host for each batch, beside the next one's work.

On CUDA a copy goes through pinned memory on a stream of its own; on the CPU the same interface
hands the tensor on, and the count is the same.
"""

import torch


class HostCopies:
    """Copies of finished buffers to the host, and how many there have been."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.count = 0
        """Copies begun."""

    def start(self, buffer: torch.Tensor) -> "HostCopy":
        """Begin to copy `buffer`, contiguous, once the work queued so far has filled it.

        Nobody may write to it any more. Its device memory is free again when the copy has ended,
        so a caller that begins the next batch before it waits holds two buffers.
        """
        self.count += 1
        if self._stream is None:
            return HostCopy(buffer.to("cpu"), None)
        # Pinned blocks are kept and used again by torch, so each copy may have its own.
        host = torch.empty(buffer.shape, dtype=buffer.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(buffer.device))
        with torch.cuda.stream(self._stream):
            host.copy_(buffer, non_blocking=True)
        buffer.record_stream(self._stream)
        # One that sleeps while it waits: spinning would take the core from the workers beside.
        done = torch.cuda.Event(blocking=True)
        done.record(self._stream)
        return HostCopy(host, done)


class HostCopy:
    """One copy, perhaps not finished."""

    def __init__(self, host: torch.Tensor, done: torch.cuda.Event | None) -> None:
        self._host = host
        self._done = done

    def wait(self) -> torch.Tensor:
        """The tensor on the CPU, the caller's to keep; returns once its bytes are there."""
        if self._done is not None:
            self._done.synchronize()
        return self._host


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A CPU tensor on `device`, without waiting for the work that is queued there."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
