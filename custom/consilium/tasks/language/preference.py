"""Direct preference optimization (DPO): the better of two answers becomes more likely than the worse one.

Source: R. Rafailov et al., "Direct Preference Optimization: Your Language Model is Secretly a Reward Model", NeurIPS 2023,
equation 7. The reference model is the base without its adapter, so no second copy of the weights is needed.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from consilium.adapters.layers import disabled
from consilium.tasks.base import Batch, evaluating

Losses = Callable[[nn.Module, Batch], tuple[Tensor, Tensor]]
"""A function like task.token_losses: it returns each token's cross-entropy, 0 if not learned, and a mask of learned tokens."""


def reward_margins(model: nn.Module, batch: Batch, beta: float, losses_of: Losses) -> Tensor:
    """Return the implicit reward of the better answer minus that of the worse one (N,), float32, for pairs (N, 2, T).

    An answer's reward is `beta` times the log of its probability under the model over that under the base.
    """
    rows = {name: values.flatten(0, 1) for name, values in batch.items()}
    with torch.no_grad(), evaluating(model), disabled(model):
        reference = losses_of(model, rows)[0].sum(1)
    better, worse = (reference - losses_of(model, rows)[0].sum(1)).view(-1, 2).unbind(1)
    return beta * (better - worse)
