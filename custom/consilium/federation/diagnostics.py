"""What a run measures of itself beside the scores; see config/sections.py. Pure functions, and the pictures at a site."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from consilium.adapters.names import bottleneck_position, factor, is_head
from consilium.config.job import JobConfig
from consilium.core.errors import ConfigError
from consilium.core.linalg.lowrank import Product, norm
from consilium.core.messages import Tensors
from consilium.privacy import mechanism
from consilium.report import figures
from consilium.strategies.strategy import Role, ServerState, SiteResult, Strategy, shares

DRIFT = "drift.json"
"""The file in a run's private folder at a site: how far each adapter moved, by round and phase."""
NOISE_TITLE = "norm of what noise adds to the product B A/"


def check_deviation(config: JobConfig, source: Path | str) -> None:
    """Raise ConfigError for a deviation from mean factors where sites have factors of other shapes, which have no mean."""
    strategy = config.strategy
    if not config.diagnostics.deviation:
        return
    if config.adapter_kind.unequal_ranks or strategy.traits.skips_blocks:
        what = f"strategy {strategy.name!r} sends sites factors of unequal shapes, which have no mean"
        raise ConfigError(f"{source}: diagnostics.deviation: true: {what}; remove it")


def deviation(strategy: Strategy, state: ServerState, results: Mapping[str, SiteResult], scale: float) -> dict[str, float]:
    """Return ||s (sum_k p_k B_k A_k - B A)||_F over all layers, B and A the means, and that over ||s sum_k p_k B_k A_k||_F.

    DEeR (Zhu et al., IEEE TMI 2025), Eq. 7. As sum p_k = 1 it is sum_k p_k (B_k - B)(A_k - A), which loses no digits where it
    is 0. Layers of which a site keeps a factor are left out; {} where that is all of them.
    """
    share = shares(dict(sorted(results.items())))
    apart = whole = 0.0
    layers = [name.removesuffix(".lora_A") for name in state.shared | state.initial if factor(name) == "A"]
    travelling = [layer for layer in layers if not _keeps_a_factor(strategy, state, layer)]
    if not travelling:
        return {}
    for layer in travelling:
        pairs = [(p, _factors(state, layer, results[name])) for name, p in share.items()]
        mean_b, mean_a = (torch.stack([p * pair[i] for p, pair in pairs]).sum(0) for i in (0, 1))
        apart += norm(_joined([(p * (b - mean_b), a - mean_a) for p, (b, a) in pairs])) ** 2
        whole += norm(_joined([(p * b, a) for p, (b, a) in pairs])) ** 2
    return {"deviation/absolute": scale * apart**0.5, "deviation/relative": (apart / whole) ** 0.5 if whole > 0 else 0.0}


def _keeps_a_factor(strategy: Strategy, state: ServerState, layer: str) -> bool:
    roles = [strategy.role(f"{layer}.lora_{which}", state.round, state.phase) for which in "AB"]
    return Role.LOCAL in roles


def _factors(state: ServerState, layer: str, result: SiteResult) -> Product:
    """Return a site's B and A after its training, float64; for a frozen factor sent in an earlier round, the server's value."""
    known = state.initial | state.shared | result.sent.tensors
    moved = result.update.tensors
    names = (f"{layer}.lora_B", f"{layer}.lora_A")
    b, a = (known[n].double() + (moved[n].double() if n in moved else 0.0) for n in names)
    return b, a


def _joined(products: list[Product]) -> Product:
    return torch.cat([left for left, _ in products], 1), torch.cat([right for _, right in products])


def drift(start: Tensors, end: Tensors) -> dict[str, float]:
    """Return ||end - start|| / ||start|| of every adapter, from the input on: how far local training moved it.

    Bottlenecks by their number, LoRA by its layer, a head as one. FedSCA (Zhang et al. 2025), Figure 3; the paper does not say
    what its "shift" is divided by, this is our reading. An adapter that starts at 0 throughout counts by ||end|| alone.
    """
    groups: dict[str, list[str]] = {}
    for name in sorted((n for n in end if _group(n)), key=lambda n: bottleneck_position(n) or 0):  # the sort keeps the order
        groups.setdefault(_group(name), []).append(name)
    found = {}
    for group, names in groups.items():
        moved, begin = (
            sum(float(t.square().sum()) for t in values)
            for values in ([end[n].double() - start[n].double() for n in names], [start[n].double() for n in names])
        )
        found[group] = (moved / begin if begin > 0 else moved) ** 0.5
    return found


def _group(name: str) -> str:
    """Return what a tensor is counted with; "" for a parameter of the base."""
    if (position := bottleneck_position(name)) is not None:
        return f"adapter {position + 1}"
    if is_head(name):
        return "head"
    return name.rpartition(".")[0] if factor(name) else ""


def draw(run: Path, folder: Path) -> None:
    """Draw what a site's run has noted as noise.png and drift.png into its folder."""
    if not any((run / noted).is_file() for noted in (mechanism.FILE, DRIFT)):
        return
    if (run / mechanism.FILE).is_file():
        rounds: dict[int, dict[str, float]] = {}
        for place, values in _read(run / mechanism.FILE).items():
            rounds.setdefault(place[0], {}).update({n.replace("noise/", NOISE_TITLE): value for n, value in values.items()})
        named = [{f"{NOISE_TITLE}xi_B A": float("nan"), **rounds[one]} for one in sorted(rounds)]
        figures.plot_curves(folder / "noise.png", named, from_zero=True)
    if (run / DRIFT).is_file():
        figures.plot_drift(folder / "drift.png", sorted(_read(run / DRIFT).items()))


def _read(path: Path) -> dict[tuple[int, int], dict[str, float]]:
    """Return what was noted, by round and phase."""
    found = {}
    for place, values in json.loads(path.read_text()).items():
        round, phase = place.split("-")
        found[int(round), int(phase)] = values
    return found
