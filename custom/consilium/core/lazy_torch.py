"""PyTorch for modules that a job.yaml names: it is loaded by the first operation, as most commands that read a job need none.

Such a module imports these three names, and uses `torch` and `nn` in bodies of functions alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
else:
    Tensor = Any

    class _Lazy:
        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, name: str) -> Any:
            return getattr(import_module(self._name), name)

    torch, nn = _Lazy("torch"), _Lazy("torch.nn")
