"""The personalized model of a site with a local adapter, weighted for each sample by its similarity to the site's data.

The records that samples are compared with, and their representations, are never stored or sent.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from consilium.core.seeding import seed_for
from consilium.models.registry import Cut
from consilium.strategies.strategy import Interpolation
from consilium.tasks.base import Task, evaluating

SetWeight = Callable[[float | Tensor], None]


@contextmanager
def interpolate_adapter(
    model: nn.Module, cut: Cut | None, task: Task, set_weight: SetWeight, interpolation: Interpolation, seed: int
) -> Iterator[None]:
    """Within the context, every call of `model` weighs the local adapter by `interpolation`, through `set_weight`.

    `cut`: the point in the model whose output is the representation of a sample; None for a fixed weight.
    """
    examples, handle = interpolation.examples, None
    if cut is not None and examples and len(known := reference_features(model, cut, task, set_weight, examples, seed)):

        def weigh(model: nn.Module, args: Any, kwargs: Any) -> None:
            set_weight(1.0)
            with torch.no_grad():
                found = mean_at_cut(cut, lambda: model.forward(*args, **kwargs))
            set_weight(sample_weights(interpolation, found, known))

        handle = model.register_forward_pre_hook(weigh, with_kwargs=True)
    set_weight(fixed_weight(interpolation))
    try:
        yield
    finally:
        if handle:
            handle.remove()
        set_weight(0.0)


def reference_features(model: nn.Module, cut: Cut, task: Task, set_weight: SetWeight, count: int, seed: int) -> Tensor:
    """Return the representations (S, F) of `count` random training records, with the local adapter at weight 1.

    There are fewer if not all records can be read.
    """
    order = torch.randperm(task.num_samples, generator=torch.Generator().manual_seed(seed)).tolist()
    batch = task.batch(order[:count], seed_for(seed, "references"))
    if not batch:
        return torch.zeros(0)
    set_weight(1.0)
    with torch.no_grad(), evaluating(model):
        return mean_at_cut(cut, lambda: task.loss(model, batch))


def mean_at_cut(cut: Cut, run: Callable[[], Any]) -> Tensor:
    """Call `run` and return the mean over positions (N, F) of the output at the cut."""
    seen: list[Tensor] = []
    handle = cut.module.register_forward_hook(lambda module, args, output: seen.append(output))
    try:
        run()
    finally:
        handle.remove()
    return seen[-1].float().movedim(cut.axis, 1).reshape(len(seen[-1]), cut.width, -1).mean(2)


def fixed_weight(interpolation: Interpolation) -> float:
    """Return the local adapter's weight for a sample that is not compared, or that has similarity 1."""
    return 1 - interpolation.most if interpolation.as_in_code else interpolation.most


def sample_weights(interpolation: Interpolation, found: Tensor, known: Tensor) -> Tensor:
    """Return the weight of the local adapter for each of N samples, (N,).

    It follows from the mean cosine similarity of a sample's representation `found` (N, F) to the site's own samples `known`
    (S, F).
    """
    cosines = F.normalize(found, dim=1) @ F.normalize(known, dim=1).T
    if interpolation.as_in_code:
        return 1 - interpolation.most * cosines.mean(1)
    return interpolation.most * cosines.clamp(min=0).mean(1)
