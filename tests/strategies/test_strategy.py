"""Contracts every algorithm keeps, and the exact mean under them."""

import itertools
from dataclasses import asdict, fields, replace
from typing import Any

import pytest
import torch

from consilium.adapters.bottleneck import PLACES
from consilium.adapters.names import FEATURE_SHIFT, LOCAL_ADAPTER, MEAN, SHIFT, factor, local_factor_name
from consilium.core.errors import ConfigError, RefusedError
from consilium.core.messages import Payload, SiteInfo, Tensors
from consilium.server.aggregation import ExactMean, RoundAggregate
from consilium.strategies.registry import STRATEGIES
from consilium.strategies.scaffold import CONTROL
from consilium.strategies.strategy import Interpolation, Role, Strategy, Traits, label_of
from tests.conftest import strategy_of
from tests.strategies.scripted import update_of

LAYERS = {"image_encoder.blocks.0.attn.qkv": (9, 6), "mask_decoder.transformer.layers.0.self_attn.q_proj": (6, 6)}
EVERY = [cls() for cls in STRATEGIES.values()]
EQUAL = [strategy for strategy in EVERY if not (strategy.traits.ranks_differ or strategy.traits.sends_frozen_ranks)]
"""Those whose server state is the adapter itself; test_ranks.py and test_frlora.py are about the others."""


def adapter(seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    shapes = {f"{n}.lora_A": (2, i) for n, (o, i) in LAYERS.items()} | {f"{n}.lora_B": (o, 2) for n, (o, i) in LAYERS.items()}
    return {name: torch.randn(shape, generator=generator) for name, shape in sorted(shapes.items())}


def tensors_of(strategy: Strategy, seed: int) -> Tensors:
    """Return an adapter of the kind the strategy is for."""
    if strategy.name != "fedsca":
        return adapter(seed) | parts_of(strategy, seed)
    generator = torch.Generator().manual_seed(seed)
    names = [f"image_encoder.blocks.{i}.{place}.down.weight" for i in range(2) for place in PLACES]
    return {name: torch.randn(3, 4, generator=generator) for name in names}


def parts_of(strategy: Strategy, seed: int) -> Tensors:
    """Return what the strategy asks for beside the adapter."""
    generator, found = torch.Generator().manual_seed(100 + seed), Tensors()
    if LOCAL_ADAPTER in strategy.traits.parts:
        found |= {local_factor_name(name): torch.randn(t.shape, generator=generator) for name, t in adapter(seed).items()}
    if FEATURE_SHIFT in strategy.traits.parts:
        found |= {name: torch.randn(5, generator=generator) for name in (SHIFT, MEAN)}
    return found


def equal(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def test_exact_mean_does_not_depend_on_order_to_the_last_bit() -> None:
    updates = [
        ({"w": torch.randn(500, generator=torch.Generator().manual_seed(i)) * 10.0 ** (-i)}, 7 * i + 1) for i in range(5)
    ]
    results = []
    for order in itertools.permutations(updates):
        mean = ExactMean()
        for update, weight in order:
            mean.add(update, weight)
        results.append(mean.value()["w"])
    assert all(torch.equal(results[0], other) for other in results)
    total = sum(weight for _, weight in updates)
    truth = sum(u["w"].double() * w for u, w in updates) / total
    assert (results[0] - truth).abs().max() < 1e-11


def test_exact_mean_is_weighted_and_refuses_what_it_cannot_add() -> None:
    mean = ExactMean()
    with pytest.raises(RefusedError, match="no site's update"):
        mean.value()
    mean.add({"w": torch.tensor([1.0, 0.0])}, 3)
    with pytest.raises(RefusedError, match="too large to average"):
        mean.add({"w": torch.tensor([1.0, 1e9])}, 2)
    mean.add({"w": torch.tensor([5.0, 1.0])}, 1)
    assert mean.value()["w"].tolist() == [2.0, 0.25]


def corner(strategy: Strategy, name: str, tensor: torch.Tensor, round: int = 0) -> torch.Tensor:
    """Return the part of a tensor that travels: DP-DyLoRA cuts factors to the round's rank."""
    if strategy.name != "dp_dylora" or (which := factor(name)) is None:
        return tensor
    return tensor[: strategy.rank(len(tensor), round)] if which == "A" else tensor[:, : strategy.rank(tensor.shape[1], round)]


@pytest.mark.parametrize("strategy", EVERY, ids=lambda s: s.name)
def test_upload_names_shared_tensors_only_and_mutates_nothing(strategy: Strategy) -> None:
    start, end = tensors_of(strategy, 0), tensors_of(strategy, 1)
    kept = {n: t.clone() for n, t in end.items()}
    state = replace(strategy.initialize(start), round=3)
    sent = update_of(strategy, start, end, strategy.payload(state, SiteInfo("a", 1, joined=True)))
    assert (sent.round, sent.phase) == (3, 0)
    assert sent.tensors.keys() == set(strategy.names(end, Role.SHARED, 3, 0))
    assert all(torch.equal(t, corner(strategy, n, end[n] - start[n], 3)) for n, t in sent.tensors.items())
    assert equal(kept, end)


@pytest.mark.parametrize("strategy", EQUAL, ids=lambda s: s.name)
def test_a_site_starts_from_the_common_factors_once(strategy: Strategy) -> None:
    initial = tensors_of(strategy, 0)
    state = strategy.initialize(initial)
    first = strategy.payload(state, SiteInfo("a", 1, joined=False))
    later = strategy.payload(state, SiteInfo("a", 1, joined=True))
    start = strategy.receive({}, first)
    assert {n: t.shape for n, t in start.items()} == {n: t.shape for n, t in initial.items()}
    assert all(torch.equal(corner(strategy, n, start[n]), corner(strategy, n, t)) for n, t in initial.items())
    assert {n for n in later.tensors if not n.startswith(CONTROL)} == state.shared.keys()


@pytest.mark.parametrize("strategy", EQUAL, ids=lambda s: s.name)
def test_private_tensors_survive_what_the_server_sends(strategy: Strategy) -> None:
    own = tensors_of(strategy, 5)
    state = strategy.initialize(tensors_of(strategy, 0))
    received = strategy.receive(own, strategy.payload(state, SiteInfo("a", 1, joined=True)))
    assert all(torch.equal(received[n], own[n]) for n in own if n not in state.shared)


@pytest.mark.parametrize("strategy", EQUAL, ids=lambda s: s.name)
def test_constant_updates_are_a_fixed_point_whoever_takes_part(strategy: Strategy) -> None:
    state = strategy.initialize(tensors_of(strategy, 0))
    shared = strategy.names(state.shared, Role.SHARED, 0, 0)
    update = {n: torch.full_like(corner(strategy, n, state.shared[n]), 0.5) for n in shared}
    aggregate, sent = RoundAggregate(strategy), strategy.payload(state, SiteInfo("a", 1))
    for name, weight in (("b", 3), ("a", 11)):
        aggregate.add(SiteInfo(name, weight), Payload(0, 0, update), weight, sent)
    after = strategy.aggregate(state, aggregate.take())
    assert (after.round, after.phase) == ((0, 1) if strategy.traits.phases_of(0) > 1 else (1, 0))
    for name in state.shared:
        moved = corner(strategy, name, after.shared[name] - state.shared[name])
        assert torch.allclose(moved, torch.full_like(moved, 0.5 if name in shared else 0.0), atol=1e-6)


@pytest.mark.parametrize("strategy", EVERY, ids=lambda s: s.name)
def test_roles_repeat_with_the_period(strategy: Strategy) -> None:
    period = len(strategy.traits.phases)
    first, again = (strategy.traits.phase_schedule(strategy.traits.warm_up + later, period) for later in (0, period))
    assert [phase for _, phase in first] == [phase for _, phase in again]
    for name in tensors_of(strategy, 0):
        assert [strategy.role(name, *place) for place in first] == [strategy.role(name, *place) for place in again]


TIERS = {"low": {"train": 4, "download": 32}, "medium": {"train": 8, "download": 48}, "high": {"train": 16, "download": 64}}
UNEQUAL = {"tiers": TIERS, "profile": "uniform", "seed": 0}
SETTINGS: dict[str, dict[str, Any]] = {
    "fediat": {"sharing": "M4", "sor_weight": 1e-4, "ema": 0.9, "eps": 1e-5, "eps_scale": "relative"},
    "deer": {"schedule": "100%", "regulator": True, "rebalance": False, "eliminator": True},
    "dp_dylora": {"rank_min": 1, "seed": 0, "tested_rank": "full"},
    "feddpa": {"variant": "T", "reading": "as_published", "weighting": "similarity", "local_share": 0.5}
    | {"most": 0.5, "examples": 5},
    "fedala": {"layers": 1, "data": 0.8, "eta": 1.0, "threshold": 0.1, "most_passes": 20},
    "feddbe": {"kappa": 1.0, "momentum": 0.1},
    "fedsca": {"low": 1, "mixture": "sgca", "similarity": "l2", "prior": "samples", "alpha": 1.0}
    | {"normalize": True, "pull": 0.01},
    "fedra": {"share": 2 / 3, "by_site": {}, "seed": 0},
    "fedheal": {"tau": 0.3, "beta": 0.4},
    "fedprox": {"mu": 0.01},
    "scaffold": {"global_lr": 1.0},
    "lora_fair": {"loss": "cosine", "penalty": 0.01},
    "fedhera": UNEQUAL | {"aggregation": "residual", "allocation": "water_filling", "energy": "normalized", "gate": "paper"}
    | {"score": "product", "decay": 0.9},
    "fedhomolora": UNEQUAL | {"rank": None},
    "flexlora": UNEQUAL | {"values_in": "left"},
    "fedhl": UNEQUAL | {"floor": 0.1},
    "flora": UNEQUAL,
    "hetlora": UNEQUAL | {"prune": 0.99, "prune_weight": 0.0},
    "fedhello": UNEQUAL | {"rank": 8, "layers": "random"},
}  # fmt: skip
"""The settings of the papers and of their authors' code, which a job that names only the algorithm gets."""

AVERAGING: dict[str, Any] = {
    "needs": "sums", "phases": (1,), "warm_up": 0, "pools_data": False, "needs_base_weights": False, "elementwise": False,
    "fixed_basis": True, "paired_factors": False, "measured": frozenset(), "site_matrices": False, "parts": frozenset(),
    "ranks_differ": False, "one_rank": False, "sends_frozen_ranks": False, "scales_adapter": False, "skips_blocks": False,
    "fits": 1, "fits_only": False, "probe_fraction": 0.0, "interpolation": None, "fits_after_last_round": False, "label": "",
    "variants": ({},),
}  # fmt: skip
ANY_RANK: dict[str, Any] = {"needs": "sites", "ranks_differ": True, "fixed_basis": False}
TRAITS: dict[str, dict[str, Any]] = {
    "fedit": {"elementwise": True},
    "fediat": {"fits_only": True, "label": "fediat M4", "variants": tuple({"sharing": f"M{n}"} for n in (1, 2, 3, 4))},
    "deer": {"phases": (2,), "paired_factors": True},
    "dp_dylora": {"scales_adapter": True, "fits_only": True},
    "feddpa": {"parts": {LOCAL_ADAPTER}, "fits": 2, "fits_only": True, "interpolation": Interpolation(0.5, 5)}
    | {"label": "feddpa T", "variants": ({"variant": "T"}, {"variant": "F"})},
    "fedala": {"probe_fraction": 0.8},
    "feddbe": {"parts": {FEATURE_SHIFT}, "warm_up": 1, "measured": {MEAN}},
    "fedsca": {"needs": "sites", "site_matrices": True, "fits_only": True, "label": "fedsca 1"}
    | {"variants": ({"low": 1}, {"low": 4}, {"low": 0})},
    "fedra": {"needs": "sites", "skips_blocks": True, "fits_only": True},
    "fedheal": {"needs": "sites"},
    "fedprox": {"elementwise": True, "fits_only": True},
    "scaffold": {"needs": "sites", "elementwise": True, "fits_only": True},
    "lora_fair": {"needs": "sites"},
    "frlora": {"needs_base_weights": True, "sends_frozen_ranks": True},
    "local_only": {"elementwise": True},
    "centralized": {"elementwise": True, "pools_data": True},
    "fedhera": ANY_RANK,
    "fedhomolora": {"ranks_differ": True},
    "flexlora": ANY_RANK | {"one_rank": True},
    "fedhl": ANY_RANK,
    "flora": ANY_RANK | {"one_rank": True, "sends_frozen_ranks": True},
    "hetlora": ANY_RANK | {"fits_only": True},
    "fedhello": ANY_RANK,
}
"""What differs from federated averaging."""


@pytest.mark.parametrize("strategy", EVERY, ids=lambda s: s.name)
def test_settings_and_traits_are_those_of_the_papers(strategy: Strategy) -> None:
    assert asdict(strategy) == SETTINGS.get(strategy.name, {})
    found = {f.name: getattr(strategy.traits, f.name) for f in fields(Traits) if f.name not in ("warnings", "refuses_records")}
    assert found == AVERAGING | TRAITS.get(strategy.name, {})
    assert label_of(strategy) == TRAITS.get(strategy.name, {}).get("label", strategy.name)


@pytest.mark.parametrize(
    ("name", "setting", "good", "bad"),
    [
        ("dp_dylora", "rank_min", [1], [0]),
        ("fedra", "share", [1e-9, 1.0], [0.0, 1.001]),
        ("fedra", "by_site", [{"a": 1.0}, {"a" * 128: 0.5}], [{"": 0.5}, {"a" * 129: 0.5}, {"a": 0.0}]),
        ("hetlora", "tiers", [TIERS | {"a": TIERS["low"]}, TIERS | {"a" * 64: TIERS["low"]}],
         [TIERS | {"": TIERS["low"]}, TIERS | {"a" * 65: TIERS["low"]}]),
    ],
)  # fmt: skip
def test_settings_end_where_they_say(name: str, setting: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        strategy_of({"name": name, setting: value})
    for value in bad:
        with pytest.raises(ConfigError, match=rf"strategy\.{setting}"):
            strategy_of({"name": name, setting: value})


STORING = [s for s in EVERY if s.name in ("scaffold", "fedheal", "fedsca", "fedhera", "flexlora", "flora", "fedhl", "hetlora")]


@pytest.mark.parametrize("strategy", STORING, ids=lambda s: s.name)
def test_a_site_that_misses_a_round_keeps_what_the_server_stored_of_it(strategy: Strategy) -> None:
    state = strategy.initialize(tensors_of(strategy, 0))
    for round, sites in enumerate(("ab", "a")):
        aggregate = RoundAggregate(strategy)
        for name in sites:
            site = SiteInfo(name, 1)
            sent = strategy.payload(state, site)
            start = strategy.receive({}, sent)
            end = {n: t + 0.1 * (1 + (name == "b")) for n, t in start.items()}
            aggregate.add(site, update_of(strategy, start, end, sent), 1, sent)
        before, state = state, strategy.aggregate(state, aggregate.take())
        assert state.round == round + 1
    assert state.reported == {"a": 1, "b": 0}
    assert state.sites.keys() == before.sites.keys()
    assert all(torch.equal(state.sites["b"][n], t) for n, t in before.sites.get("b", {}).items())
