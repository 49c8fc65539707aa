"""The bytes of tensors that are alive while a model computes, fake ones or real."""

import weakref
from collections.abc import Callable, Set
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    """Counts the bytes of the storages that are alive, those of `known` left out, and the most there were."""

    def __init__(self, known: Set[int]) -> None:
        super().__init__()
        self._known, self._sizes = known, dict[int, int]()
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in tree_leaves(made):
            if isinstance(one, Tensor):
                self.add(one)
        return made

    def add(self, tensor: Tensor) -> None:
        """Count a tensor's storage from now until it is freed."""
        storage = tensor.untyped_storage()
        if (key := storage._cdata) not in self._known and key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self.now += self._sizes[key]
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)
