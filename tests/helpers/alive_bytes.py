"""The memory of tensors that are alive at once."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# safetensors makes tensors of mapped files so.
_MAPPED = torch.ops.aten.set_.source_Storage


class AliveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that PyTorch makes inside `with`; `peak` is the most that is alive at once.

    Neither views nor tensors that are mapped from files count.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = self._alive = 0
        self._users: dict[int, int] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator, and count what it makes."""
        given = {_place(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            is_new = isinstance(each, Tensor) and _place(each) not in given and func is not _MAPPED
            if is_new or (isinstance(each, Tensor) and _place(each) in self._users):
                self._hold(each)
        return result

    def _hold(self, tensor: Tensor) -> None:
        place, size = _place(tensor), tensor.untyped_storage().nbytes()
        if not self._users.get(place):
            self._alive += size
            self.peak = max(self.peak, self._alive)
        self._users[place] = self._users.get(place, 0) + 1
        weakref.finalize(tensor, self._release, place, size)

    def _release(self, place: int, size: int) -> None:
        self._users[place] -= 1
        if not self._users[place]:
            del self._users[place]
            self._alive -= size


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
