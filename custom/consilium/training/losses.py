"""The losses of a round, read from the device seldom: to read one number makes a GPU finish all that it was given so far."""

import math
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from consilium.core.errors import ConsiliumError, Reason

AT_ONCE = frozenset({"cpu"})
"""Devices where reading a number waits for nothing."""
EVERY = 1.0
"""Seconds between two looks at the losses of another device."""


@dataclass
class Losses:
    """Losses of steps, each the sum of its batches' times their shares. `lr` is the learning rate that errors name.

    `private`: under privacy for records or patients a loss that is not finite counts as 0, as its gradient does; an error
    would end the round, and so tell, without noise, that its record was drawn.
    """

    device: torch.device
    lr: float
    private: bool = False
    total: float = 0.0
    _shares: list[float] = field(default_factory=list)
    _unread: list[Tensor] = field(default_factory=list)
    _ends: list[int] = field(default_factory=list)
    _last: float = field(default_factory=time.monotonic)

    def add(self, loss: Tensor, share: float = 1.0) -> None:
        """Note a batch's loss, which stays where it is."""
        self._unread.append(loss.detach())
        self._shares.append(share)

    def look(self, last: bool) -> bool:
        """End a step; read all that is unread where that costs nothing, is due, or the step is the `last`, and tell whether.

        `total` is then the sum over all steps so far. Raises ConsiliumError, naming the first loss that is not finite, unless
        `private`.
        """
        self._ends.append(len(self._unread))
        now = time.monotonic()
        if not (last or self.device.type in AT_ONCE or now - self._last >= EVERY):
            return False
        self._last = now
        self._read(torch.stack(self._unread).tolist() if self._unread else [])
        return True

    def _read(self, values: list[float]) -> None:
        """Add up step by step, so that it makes no difference when this is done."""
        wrong = next((value for value in values if not math.isfinite(value)), None)
        if wrong is not None and not self.private:
            what = f"training.lr: {self.lr}: the loss became {wrong}; lower it or check the data"
            raise ConsiliumError(what, Reason.TRAINING)
        products = [share * value if math.isfinite(value) else 0.0 for share, value in zip(self._shares, values, strict=True)]
        for begin, end in zip([0, *self._ends], self._ends, strict=False):
            self.total += sum(products[begin:end])
        self._shares, self._unread, self._ends = [], [], []
