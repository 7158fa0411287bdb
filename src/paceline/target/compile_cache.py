"""Where compiled kernels are kept, so that they outlive the worker that compiled them."""

import hashlib
import os
import re
from pathlib import Path

import torch
import transformers


def compile_cache_folder(root: Path) -> Path:
    """A folder below `root` for kernels of exactly this software and device.

    Named by the versions of torch, Transformers and CUDA and the device's name; with another one
    of them it is another folder, as a kernel made for one may be refused, or be slow, on another.
    """
    device, cuda = "cpu", "none"
    if torch.cuda.is_available():
        device, cuda = torch.cuda.get_device_name(), str(torch.version.cuda)
    parts = (torch.__version__, transformers.__version__, cuda, device)
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]
    readable = f"torch-{parts[0]}-transformers-{parts[1]}-cuda-{cuda}-{device}"
    return root / f"{re.sub(r'[^A-Za-z0-9.]+', '-', readable).strip('-').lower()}-{digest}"


def compile_cache_environment(folder: Path) -> dict[str, str]:
    """What tells torch's compiler and Triton to keep their kernels in `folder`."""
    return {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }


def use_compile_cache(root: Path) -> Path:
    """Have this process keep its kernels below `root`; call it before anything is compiled."""
    folder = compile_cache_folder(root)
    os.environ.update(compile_cache_environment(folder))
    return folder
