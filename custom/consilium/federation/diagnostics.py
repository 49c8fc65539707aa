"""Measurements of a run beside its scores (`diagnostics:` in config/run_sections.py), and a site's figures of them."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from consilium.adapters.names import bottleneck_position, factor, is_head
from consilium.core.low_rank_sums import Product, norm
from consilium.core.messages import Tensors
from consilium.privacy import mechanism
from consilium.report import figures
from consilium.strategies.strategy import Role, ServerState, SiteResult, Strategy, scaling_multiplier, shares

DRIFT = "drift.json"
"""File in a run's private folder at a site: the relative change of each adapter, by round and phase."""
NOISE_TITLE = "norm of what noise adds to the product B A/"


def deviation(strategy: Strategy, state: ServerState, results: Mapping[str, SiteResult], scale: float) -> dict[str, float]:
    """Return the deviation of the product of mean factors from the mean of products (DEeR, Zhu et al., IEEE TMI 2025, Eq. 7).

    Absolute: ||s (sum_k p_k B_k A_k - B A)||_F over all layers, with B and A the means and s = `scale`, alpha / r, times the
    payload's scaling. Relative: the same over ||s sum_k p_k B_k A_k||_F. It is computed as sum_k p_k (B_k - B)(A_k - A), equal
    as sum p_k = 1, which loses no digits near 0. Layers with a factor that stays at the sites are left out; without other
    layers return {}.
    """
    share = shares(dict(sorted(results.items())))
    apart = whole = 0.0
    layers = [name.removesuffix(".lora_A") for name in state.shared | state.initial if factor(name) == "A"]
    place = state.round, state.phase
    sent = [one for one in layers if all(strategy.role(f"{one}.lora_{f}", *place) is not Role.LOCAL for f in "AB")]
    if not sent:
        return {}
    for layer in sent:
        names, pairs = (f"{layer}.lora_B", f"{layer}.lora_A"), []
        for site, p in share.items():  # B and A after the site's training; a frozen factor is as the server knows it
            known = state.initial | state.shared | results[site].sent.tensors
            moved = results[site].update.tensors
            b, a = (known[n].double() + (moved[n].double() if n in moved else 0.0) for n in names)
            pairs.append((p, (b, a)))
        mean_b, mean_a = (torch.stack([p * pair[i] for p, pair in pairs]).sum(0) for i in (0, 1))
        apart += norm(_concatenate_products([(p * (b - mean_b), a - mean_a) for p, (b, a) in pairs])) ** 2
        whole += norm(_concatenate_products([(p * b, a) for p, (b, a) in pairs])) ** 2
    scale *= scaling_multiplier(strategy, next(iter(results.values())).sent)  # which is equal at all sites
    return {"deviation/absolute": scale * apart**0.5, "deviation/relative": (apart / whole) ** 0.5 if whole > 0 else 0.0}


def _concatenate_products(products: list[Product]) -> Product:
    return torch.cat([left for left, _ in products], 1), torch.cat([right for _, right in products])


def drift(start: Tensors, end: Tensors) -> dict[str, float]:
    """Return the relative change ||end - start|| / ||start|| of every adapter by local training, in order from the input.

    There is one value per bottleneck, per LoRA layer and for a head. FedSCA (Zhang et al. 2025), Figure 3; the paper does not
    say what its "shift" is divided by, so this is our reading. If an adapter's start is all 0, the value is ||end||.
    """
    groups: dict[str, list[str]] = {}
    for name in sorted(
        (n for n in end if _group_name(n)), key=lambda n: bottleneck_position(n) or 0
    ):  # the sort keeps the order
        groups.setdefault(_group_name(name), []).append(name)
    found = {}
    for group, names in groups.items():
        moved, begin = (
            sum(float(t.square().sum()) for t in values)
            for values in ([end[n].double() - start[n].double() for n in names], [start[n].double() for n in names])
        )
        found[group] = (moved / begin if begin > 0 else moved) ** 0.5
    return found


def _group_name(name: str) -> str:
    """Return the name of the adapter that a tensor belongs to, as in `drift`; "" for a parameter of the base."""
    if (position := bottleneck_position(name)) is not None:
        return f"adapter {position + 1}"
    if is_head(name):
        return "head"
    return name.rpartition(".")[0] if factor(name) else ""


def draw(run: Path, folder: Path) -> None:
    """Draw noise.png and drift.png into `folder` from the measurements that a site stored in `run`, if there are any."""
    if (run / mechanism.FILE).is_file():
        rounds: dict[int, dict[str, float]] = {}
        for place, values in _read_measurements(run / mechanism.FILE).items():
            rounds.setdefault(place[0], {}).update({n.replace("noise/", NOISE_TITLE): value for n, value in values.items()})
        named = {one + 1.0: {f"{NOISE_TITLE}xi_B A": float("nan"), **rounds[one]} for one in sorted(rounds)}
        figures.plot_curves(folder / "noise.png", named, from_zero=True)
    if (run / DRIFT).is_file():
        figures.plot_drift(folder / "drift.png", sorted(_read_measurements(run / DRIFT).items()))


def _read_measurements(path: Path) -> dict[tuple[int, int], dict[str, float]]:
    """Return the stored measurements by (round, phase)."""
    stored = ((place.split("-"), values) for place, values in json.loads(path.read_text()).items())
    return {(int(round), int(phase)): values for (round, phase), values in stored}
