"""What the GPUs of this machine say of themselves, without CUDA and without torch.

Asking through NVML makes no CUDA context, so the asking itself takes no memory of a GPU.
"""

import shutil
import subprocess
from dataclasses import dataclass
from typing import Any, Protocol

_SECONDS = 8.0
_GPU_FIELDS = "index,uuid,name,memory.total,memory.used,persistence_mode"
_HOLDER_FIELDS = "gpu_uuid,pid,used_memory"


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU."""

    index: int
    """Its number in the order of the bus, as `nvidia-smi` shows it."""
    name: str
    total: int
    """Bytes."""
    used: int
    """Bytes, the driver's own included."""
    persistence: bool | None = None
    """Whether the driver stays loaded without users; None where that is not known."""


@dataclass(frozen=True, kw_only=True)
class GpuHolder:
    """A process that the driver says holds memory of a GPU."""

    gpu: int
    """Index of the GPU."""
    pid: int
    """As the driver counts: that of the machine, not of a container."""
    used: int | None = None
    """Bytes; None where the driver does not tell."""


@dataclass(frozen=True, kw_only=True)
class GpuView:
    """All of them at one moment."""

    gpus: tuple[Gpu, ...] = ()
    holders: tuple[GpuHolder, ...] = ()
    trouble: str = ""
    """Why nothing can be said, where nothing can; empty where `gpus` are all there are."""


class GpuProbe(Protocol):
    """Looks at the GPUs; raises nothing, `trouble` says what went wrong."""

    def look(self) -> GpuView:
        """As they are now."""
        ...


class HereProbe:
    """NVML, through the extra `gpu`; without it `nvidia-smi`, where that is installed."""

    def look(self) -> GpuView:
        """As they are now."""
        try:
            import pynvml
        except ImportError:
            return SmiProbe().look()
        return NvmlProbe(pynvml).look()


class NvmlProbe:
    """The driver's own library."""

    def __init__(self, nvml: Any) -> None:
        """`nvml` is the module `pynvml` of nvidia-ml-py."""
        self._nvml = nvml

    def look(self) -> GpuView:
        """As they are now."""
        nvml = self._nvml
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            return GpuView(trouble=f"no NVIDIA driver answers ({error})")
        try:
            return self._look()
        except nvml.NVMLError as error:
            return GpuView(trouble=f"the NVIDIA driver fails ({error})")
        finally:
            nvml.nvmlShutdown()

    def _look(self) -> GpuView:
        nvml = self._nvml
        gpus, holders = [], {}
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            gpus.append(
                Gpu(
                    index=index,
                    name=_text(nvml.nvmlDeviceGetName(handle)),
                    total=int(memory.total),
                    used=int(memory.used),
                    persistence=self._persistence(handle),
                )
            )
            for process in self._processes(handle):
                used = process.usedGpuMemory
                found = GpuHolder(
                    gpu=index, pid=int(process.pid), used=None if used is None else int(used)
                )
                holders[index, found.pid] = found
        return GpuView(gpus=tuple(gpus), holders=tuple(holders.values()))

    def _processes(self, handle: Any) -> list[Any]:
        """Those that draw and those that compute; one that does both is in both lists."""
        found: list[Any] = []
        for ask in (
            self._nvml.nvmlDeviceGetGraphicsRunningProcesses,
            self._nvml.nvmlDeviceGetComputeRunningProcesses,
        ):
            try:
                found += ask(handle)
            except self._nvml.NVMLError:
                continue  # A GPU in MIG mode, or one without a display, knows one list alone.
        return found

    def _persistence(self, handle: Any) -> bool | None:
        try:
            return bool(self._nvml.nvmlDeviceGetPersistenceMode(handle))
        except self._nvml.NVMLError:
            return None


class SmiProbe:
    """The driver's command."""

    def __init__(self, command: str | None = None) -> None:
        """`command` instead of the `nvidia-smi` on PATH."""
        self._command = command or shutil.which("nvidia-smi")

    def look(self) -> GpuView:
        """As they are now."""
        if self._command is None:
            return GpuView(
                trouble="neither the package nvidia-ml-py nor nvidia-smi is installed, or there "
                "is no NVIDIA driver"
            )
        try:
            return parse_smi(
                self._ask(f"--query-gpu={_GPU_FIELDS}"),
                self._ask(f"--query-compute-apps={_HOLDER_FIELDS}"),
            )
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            return GpuView(trouble=f"nvidia-smi fails ({error})")

    def _ask(self, query: str) -> str:
        command = [str(self._command), query, "--format=csv,noheader,nounits"]
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, check=True
        )
        return ended.stdout


def parse_smi(gpus: str, holders: str) -> GpuView:
    """The view in two answers of `nvidia-smi`, memory in MiB. Raises ValueError for other text."""
    found, index_of = [], {}
    for line in filter(str.strip, gpus.splitlines()):
        # A name may hold commas.
        index, uuid, *name, total, used, persistence = (part.strip() for part in line.split(","))
        index_of[uuid] = int(index)
        found.append(
            Gpu(
                index=int(index),
                name=", ".join(name),
                total=int(total) << 20,
                used=int(used) << 20,
                persistence={"Enabled": True, "Disabled": False}.get(persistence),
            )
        )
    held = []
    for line in filter(str.strip, holders.splitlines()):
        uuid, pid, used = (part.strip() for part in line.split(","))
        if uuid not in index_of:
            raise ValueError(f"a holder of the unknown GPU {uuid}")
        held.append(
            GpuHolder(
                gpu=index_of[uuid],
                pid=int(pid),
                used=int(used) << 20 if used.isdecimal() else None,
            )
        )
    return GpuView(gpus=tuple(found), holders=tuple(held))


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
