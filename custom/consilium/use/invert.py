"""Gradient inversion: which training pictures a server could reconstruct, or recognize, from a single update.

The setting favours the attacker. A site takes one step on a batch and sends its unchanged gradient. The attacker knows the
model, the labels and the number of pictures. It starts from noise, and searches for pictures whose gradient has the same
direction. It minimizes the cosine distance plus the total variation by Adam on signs of gradients (Geiping et al.). The same
attack is made on three updates:

    alone     the site's own update, as it leaves without secure aggregation
    sum       the sum of several sites' updates, which is all that secure aggregation reveals; all their pictures are searched
    masked    the site's own update under masks, as a site sends it in secure aggregation

A second, easier attack is recognition. The attacker has candidate pictures, the right ones among them. It selects those whose
gradients add up to the observed update (non-negative least squares). A failed reconstruction proves no privacy, because other
attacks are stronger.

Source: J. Geiping, H. Bauermeister, H. Droege, M. Moeller, "Inverting Gradients - How easy is it to break privacy in federated
learning?", NeurIPS 2020. Its augmentation, restarts and search for labels are left out.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from consilium.adapters import adapter_state
from consilium.config.site import SiteConfig
from consilium.core.errors import ConfigError, DataError
from consilium.core.messages import Tensors
from consilium.core.storage import write_figure
from consilium.federation.job_assembly import build_task
from consilium.privacy.secagg.arithmetic import UNIT, flatten, layout, quantize, unflatten
from consilium.privacy.secagg.sealing import mask
from consilium.strategies.strategy import Role, Strategy
from consilium.tasks.base import Batch, Task
from consilium.use.attack import read_samples, with_all_samples
from consilium.use.model import TrainedModel, settings_for

PIXELS = 255.0
"""The largest value of a picture."""
RATE, SMOOTH = 0.1, 1.0
"""RATE: Adam's learning rate, for pictures scaled to 0..1. SMOOTH: the weight of the total variation."""
TITLES = {"alone": "from its update", "sum": "from the sum of sites", "masked": "from its update under masks"}
CANDIDATES = 40
"""Largest number of candidate pictures for recognition."""


@dataclass(frozen=True)
class Inverted:
    """The result of an attack. `pictures`: the reconstructions (N, 3, S, S) in 0..255.

    `psnr`: their mean PSNR in dB. `told`: number of the site's pictures that were recognized among the candidates. `chance`:
    the expected number for random guesses. `distance`: the final cosine distance.
    """

    attack: str
    pictures: Tensor
    psnr: float
    told: int
    chance: float
    distance: float


@dataclass(frozen=True)
class Inversion:
    """The site's `pictures` (N, 3, S, S) and the results of all attacks.

    `candidates`: number of candidate pictures. `guess`: mean PSNR of a trivial guess, the mean of all candidates.
    """

    pictures: Tensor
    candidates: int
    guess: float
    attacks: list[Inverted]


def run_inversion(
    opened: TrainedModel,
    site: SiteConfig,
    name: str,
    phantom_folder: Path,
    count: int = 1,
    sites: int = 3,
    steps: int = 400,
    on_progress: Callable[[], None] = lambda: None,
) -> Inversion:
    """Attack the first `count` training pictures of `site`, and return the results. `name`: the site's name in the run.

    `sites`: number of sites in the sum. The next pictures of the same list stand for the other sites' pictures. `steps`: steps
    of each reconstruction. `phantom_folder`: receives generated phantoms. `on_progress` is called at each step. Raises
    ConfigError for a task without pictures, DataError for too few pictures.
    """
    own = settings_for(opened, site)
    data, config = read_samples(opened, name, own, phantom_folder), with_all_samples(opened.config)
    there = len(data.splits["training"])
    if there < max(2, count * sites):
        raise DataError(f"{data.path}: {there} training pictures, the sum needs {count * sites}; lower --batch or --sum")
    task, model = build_task(config, data, own), opened.model
    asked = [task.batch([index], 0) for index in range(min(there, max(CANDIDATES, count * sites)))]
    if not all(isinstance(one.get("image"), Tensor) and one["image"].ndim == 4 for one in asked):
        raise ConfigError(f"task.name: {config.task.name!r} trains on no pictures that could be drawn; attack another run")
    names, near = enable_shared_gradients(model, config.strategy), join_batches(asked[:count])
    each = [{n: t.detach() for n, t in gradient(model, task, one, names).items()} for one in asked]
    pictures = torch.cat([one["image"] for one in asked])
    targets = {
        "alone": (near, mean_gradient(each[:count])),
        "sum": (join_batches(asked[: count * sites]), mean_gradient(each[: count * sites])),
    }
    targets["masked"] = near, mask_update(targets["alone"][1], 0)
    found = []
    for attack, (batch, target) in targets.items():
        drawn, distance = invert(model, task, target, batch, steps, 0, on_progress)
        chosen = contributing_candidates(each, target, len(batch["image"]))
        told, chance = len(chosen & set(range(count))), count * len(batch["image"]) / len(asked)
        found.append(Inverted(attack, drawn[:count], psnr(drawn[:count], pictures[:count]), told, chance, distance))
    guess = psnr(pictures.mean(0, keepdim=True).expand_as(pictures[:count]), pictures[:count])
    return Inversion(pictures[:count], len(asked), guess, found)


def join_batches(batches: Sequence[Batch]) -> Batch:
    """Return the concatenation of several batches."""
    return {key: torch.cat([one[key] for one in batches]) for key in batches[0]}


def mean_gradient(gradients: Sequence[Tensors]) -> Tensors:
    """Return the mean of several gradients."""
    return {name: torch.stack([one[name] for one in gradients]).mean(0) for name in gradients[0]}


def contributing_candidates(gradients: Sequence[Tensors], target: Tensors, count: int) -> set[int]:
    """Return the indices of the `count` candidates that contribute most to the gradient `target`.

    `gradients`: of each candidate picture. Non-negative least squares fits `target` by a weighted sum of them.
    Candidates with weight 0 are not returned.
    """
    from scipy.optimize import nnls

    *rows, wanted = (torch.cat([t.flatten() for t in one.values()]).double().cpu().numpy() for one in [*gradients, target])
    weights, _ = nnls(np.stack(rows).T, wanted / max(float(np.linalg.norm(wanted)), 1e-300), maxiter=100 * len(gradients))
    return {place for place in np.argsort(-weights, kind="stable")[:count].tolist() if weights[place] > 0}


def psnr(drawn: Tensor, pictures: Tensor) -> float:
    """Return the peak signal-to-noise ratio in dB, mean over pictures (N, 3, S, S) in 0..255."""
    errors = (drawn - pictures).square().flatten(1).mean(1).clamp_min(1e-9)
    return float((10 * torch.log10(PIXELS**2 / errors)).mean())


def gradient(model: nn.Module, task: Task, batch: Batch, names: Sequence[str], graph: bool = False) -> Tensors:
    """Return the gradient of a batch's loss with respect to the tensors `names`. `graph`: keep it differentiable."""
    live = adapter_state.tensors(model)
    with sdpa_kernel([SDPBackend.MATH]):  # other kernels have no second derivatives
        found = torch.autograd.grad(task.loss(model, batch), [live[name] for name in names], create_graph=graph)
    return dict(zip(names, found, strict=True))


def enable_shared_gradients(model: nn.Module, strategy: Strategy) -> list[str]:
    """Return the names of trained tensors that leave in a round's first phase, and turn their gradients on."""
    live = adapter_state.tensors(model)
    names = [name for name in strategy.names(live, Role.SHARED, 0, 0) if isinstance(live[name], nn.Parameter)]
    for name in names:
        live[name].requires_grad_(True)
    return names


def mask_update(update: Tensors, seed: int) -> Tensors:
    """Return a masked update as a server without the mask reads it: the integers that a site sends, as float32."""
    order = layout({name: tuple(tensor.shape) for name, tensor in update.items()})
    words = flatten(quantize(update), 1, 2**62)
    words += mask(seed.to_bytes(32, "big"), len(words))
    return {name: tensor.double().mul(UNIT).float() for name, tensor in unflatten(words, order)[0].items()}


def invert(
    model: nn.Module,
    task: Task,
    target: Tensors,
    like: Batch,
    steps: int,
    seed: int,
    on_progress: Callable[[], None] = lambda: None,
) -> tuple[Tensor, float]:
    """Return (pictures (N, 3, S, S) whose gradient has the direction of `target`, the final cosine distance).

    `like`: a batch with the true labels. Of its pictures only the shape is used.
    """
    looked = torch.rand(like["image"].shape, generator=torch.Generator().manual_seed(seed)).requires_grad_(True)
    adam = torch.optim.Adam([looked], lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, steps)
    best, least = looked.detach().clone(), math.inf
    for _ in range(steps):
        on_progress()
        own = gradient(model, task, {**like, "image": looked * PIXELS}, list(target), graph=True)
        product = torch.stack([(own[n] * target[n]).sum() for n in target]).sum()
        lengths = [torch.stack([one[n].square().sum() for n in target]).sum().sqrt() for one in (own, target)]
        away = 1 - product / (lengths[0] * lengths[1]).clamp_min(1e-30)
        if (now := float(away.detach())) < least:
            best, least = looked.detach().clone(), now
        (looked.grad,) = torch.autograd.grad(
            away + SMOOTH * (looked.diff(dim=2).abs().mean() + looked.diff(dim=3).abs().mean()), [looked]
        )
        looked.grad.sign_()
        adam.step()
        schedule.step()
        with torch.no_grad():
            looked.clamp_(0, 1)
    return best * PIXELS, least


def draw(path: Path, found: Inversion) -> None:
    """Draw a figure with every picture beside its reconstruction by each attack, and write it to `path`."""
    columns = [("the site's own", found.pictures), *((TITLES[one.attack], one.pictures) for one in found.attacks)]
    count = len(found.pictures)
    figure = Figure(figsize=(2.2 * len(columns), 2.2 * count + 0.5), layout="constrained")
    for axes, row in zip(figure.subplots(count, len(columns), squeeze=False), range(count), strict=True):
        for axis, (title, pictures) in zip(axes, columns, strict=True):
            axis.imshow(pictures[row].permute(1, 2, 0).round().clamp(0, 255).to(torch.uint8).cpu().numpy())
            axis.set_axis_off()
            if row == 0:
                axis.set_title(title, fontsize=8)
    write_figure(path, figure, dpi=150)
