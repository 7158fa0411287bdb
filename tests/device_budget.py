"""A device of so many bytes, on a machine that has none."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class DeviceBudget(TorchDispatchMode):
    """What lies on the device is what it is given, and all that operations make of that.

    So a tensor is of the device where it would be on a GPU: what is computed from a weight, and
    not what a weight is copied into. While the mode is active, a tensor for which there is no room
    raises as torch does on a GPU. Not counted: what an operation takes and gives back inside.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.budget: int | None = None
        """Bytes; None is without bounds."""
        self.made = 0
        """Bytes of all tensors that were made there, also of those that are gone."""
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}
        for tensor in tensors:
            self._hold(tensor.untyped_storage())
        self.peak = self.bytes

    @property
    def bytes(self) -> int:
        """What lies there now."""
        self._held = {key: held for key, held in self._held.items() if not held[0].expired()}
        return sum(size for _, size in self._held.values())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = self._storages((args, kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if any(key in self._held for key in given):
            for key, storage in self._storages(result).items():
                if key not in given and key not in self._held:
                    self._hold(storage)
                    self.made += storage.nbytes()
            self.peak = max(self.peak, self.bytes)
            if self.budget is not None and self.bytes > self.budget:
                raise torch.OutOfMemoryError(f"out of memory. Tried to hold {self.bytes} bytes")
        return result

    def _hold(self, storage: torch.UntypedStorage) -> None:
        self._held[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())

    def _storages(self, values: Any) -> dict[int, torch.UntypedStorage]:
        found = (x.untyped_storage() for x in tree_leaves(values) if isinstance(x, torch.Tensor))
        return {storage._cdata: storage for storage in found}
