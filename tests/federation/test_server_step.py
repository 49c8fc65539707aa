"""The server's optimizers and robust means: worked out by hand, beside a plain numpy loop, and in whole runs."""

import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from consilium import __version__
from consilium.adapters.names import MEAN
from consilium.config.job import JobConfig
from consilium.config.run_sections import ServerConfig
from consilium.core.errors import ConfigError, RefusedError
from consilium.core.messages import Hello, Payload, SiteInfo
from consilium.core.schema import validate
from consilium.federation.job_assembly import assemble_job
from consilium.server.aggregation import RoundAggregate, aggregate_results, robust_mean, server_optimizer_step
from consilium.server.coordinator import Coordinator
from consilium.strategies.deer import DEeR
from consilium.strategies.dp_dylora import DPDyLoRA
from consilium.strategies.fedit import FedIT
from consilium.strategies.lora_fair import LoraFair
from consilium.strategies.strategy import Role, ServerState
from tests.conftest import small_config

MEANS = [np.array([0.5, -2.0, 0.0]), np.array([-0.25, 1.0, 0.125]), np.array([0.0625, -0.5, 3.0])]
OPTIMIZERS: list[dict[str, Any]] = [
    {"optimizer": "momentum", "lr": 0.7, "beta1": 0.6},
    {"optimizer": "adam", "lr": 0.05, "beta1": 0.8, "beta2": 0.95, "tau": 0.01},
    {"optimizer": "yogi", "lr": 0.05, "beta1": 0.8, "beta2": 0.95, "tau": 0.01},
]


def job_of(server: dict[str, Any], strategy: str | dict[str, Any] = "fedit", **sections: Any) -> JobConfig:
    """Return the small job with a `server:` section, read as a job.yaml."""
    raw = small_config(strategy).model_dump(mode="json") | {"server": server}
    return validate(JobConfig, raw | sections, Path("job.yaml"))


def numpy_loop(server: Mapping[str, Any]) -> np.ndarray:
    """Return x from 0 after three rounds of Reddi et al.'s Algorithm 2, or of FedAvgM."""
    x, m, v = np.zeros(3), np.zeros(3), np.full(3, server.get("tau", 0.0) ** 2)
    for update in MEANS:
        if server["optimizer"] == "momentum":
            m = server["beta1"] * m + update
            x = x + server["lr"] * m
            continue
        m = server["beta1"] * m + (1 - server["beta1"]) * update
        if server["optimizer"] == "adam":
            v = server["beta2"] * v + (1 - server["beta2"]) * update**2
        else:
            v = v - (1 - server["beta2"]) * update**2 * np.sign(v - update**2)
        x = x + server["lr"] * m / (np.sqrt(v) + server["tau"])
    return x


@pytest.mark.parametrize("server", OPTIMIZERS, ids=lambda s: s["optimizer"])
def test_three_rounds_are_a_plain_loops(server: dict[str, Any]) -> None:
    strategy, state = FedIT(), ServerState(0, 0, {"w": torch.zeros(3, dtype=torch.float64)}, {})
    for update in MEANS:
        before = {name: moment.clone() for name, moment in state.optimizer.items()}
        after = strategy.aggregate(*server_optimizer_step(ServerConfig(**server), state, {"w": torch.from_numpy(update)}))
        assert all(torch.equal(before[name], moment) for name, moment in state.optimizer.items())  # the old state stands
        state = after
    assert state.shared["w"].numpy() == pytest.approx(numpy_loop(server), rel=1e-12)
    assert state.round == 3


def test_one_step_by_hand() -> None:
    """D = 3, tau = 1, so v starts at 1. Adam: v = 0.75 + 2.25 = 3; yogi: v = 1 + 0.25 9 = 3.25; m = 0.5 3 = 1.5."""
    state, mean = ServerState(0, 0, {"w": torch.zeros(1)}, {}), {"w": torch.tensor([3.0])}
    options = {"lr": 2.0, "beta1": 0.5, "beta2": 0.75, "tau": 1.0}
    for name, expected in (("adam", 3 / (math.sqrt(3) + 1)), ("yogi", 3 / (math.sqrt(3.25) + 1))):
        _, steps = server_optimizer_step(ServerConfig(optimizer=name, **options), state, mean)
        assert steps["w"].item() == pytest.approx(expected)
    momentum = ServerConfig(optimizer="momentum", lr=2.0, beta1=0.5)
    after, steps = server_optimizer_step(momentum, state, mean)
    assert steps["w"].item() == 6.0
    assert server_optimizer_step(momentum, after, mean)[1]["w"].item() == 9.0  # m = 0.5 3 + 3


def test_without_an_optimizer_nothing_changes() -> None:
    state, mean = ServerState(0, 0, {"w": torch.zeros(1)}, {}), {"w": torch.ones(1)}
    for server in (ServerConfig(), ServerConfig(optimizer="momentum", beta1=0.0)):
        after, steps = server_optimizer_step(server, state, mean)
        assert steps["w"].item() == 1.0
        assert after is state or server.optimizer


def test_a_tensors_state_rests_while_the_other_factor_trains() -> None:
    a, b = "q_proj.lora_A", "q_proj.lora_B"
    strategy, server = DEeR(), ServerConfig(optimizer="momentum", beta1=0.5)
    state = strategy.initialize({a: torch.zeros(1, 1), b: torch.zeros(1, 1)})
    for name in (b, a, b):
        assert strategy.role(name, state.round, state.phase) is Role.SHARED
        state = strategy.aggregate(*server_optimizer_step(server, state, {name: torch.ones(1, 1)}))
    assert (state.shared[a].item(), state.shared[b].item()) == (1.0, 2.5)


def test_ranks_that_a_round_leaves_out_keep_their_state() -> None:
    """dp_dylora at rank 1 of 2: only the first row moves, and goes on with its own momentum."""
    server = ServerConfig(optimizer="momentum", beta1=0.5)
    state = ServerState(0, 0, {"x.lora_A": torch.zeros(2, 3)}, {})
    for rank in (2, 1, 2):
        state, steps = server_optimizer_step(server, state, {"x.lora_A": torch.ones(rank, 3)})
    assert steps["x.lora_A"].tolist() == [[1.75] * 3, [1.5] * 3]
    strategy = DPDyLoRA()
    full = strategy.initialize({"x.lora_A": torch.zeros(2, 3), "x.lora_B": torch.zeros(3, 2)})
    update = {n: t for n, t in strategy.payload(full, SiteInfo("a", 1)).tensors.items()}
    assert strategy.aggregate(*server_optimizer_step(server, full, update)).round == 1


@pytest.mark.parametrize(
    ("options", "values", "expected"),
    [
        ({"mean": "median"}, [9.0, 1.0, 2.0], 2.0),
        ({"mean": "median"}, [9.0, 1.0, 2.0, 4.0], 3.0),
        ({"mean": "median"}, [5.0], 5.0),
        ({"mean": "trimmed", "trim": 0.2}, [100.0, 1.0, 2.0, 3.0, -50.0], 2.0),
        ({"mean": "trimmed", "trim": 0.25}, [100.0, 1.0, 4.0, -50.0], 2.5),
        ({"mean": "trimmed", "trim": 0.1}, [100.0, 1.0, 2.0, 6.0], 4.0),  # rounded up to one of four
        ({"mean": "trimmed", "trim": 0.4}, [1.0, 3.0], 2.0),  # a value is left at each end
        ({"mean": "trimmed", "trim": 0.45}, [100.0, 1.0, 4.0, -50.0], 2.5),  # two of four would leave none
        ({"mean": "trimmed", "trim": 0.28}, [*[0.0] * 7, 4.0, *[5.0] * 9, 17.0, *[99.0] * 7], 6.0),  # of 25 seven, not eight
    ],
)
def test_robust_means_by_hand_in_any_order(options: dict[str, Any], values: list[float], expected: float) -> None:
    for order in itertools.islice(itertools.permutations(reversed(values)), 120):
        updates = [{"w": torch.tensor([value, -value])} for value in order]
        assert robust_mean(ServerConfig(**options), updates)["w"].tolist() == [expected, -expected]


@pytest.mark.parametrize(("server", "mean"), [({"mean": "median"}, 1.1), ({}, (1 + 1e4 + 1.1) / 3)])
def test_one_site_carries_a_mean_away_and_no_median_and_what_is_taken_is_forgotten(server: dict[str, Any], mean: float) -> None:
    aggregate = RoundAggregate(FedIT(), ServerConfig(**server))
    for name, value in (("c", 1.0), ("a", 1e4), ("b", 1.1)):
        aggregate.add(SiteInfo(name, 10**6), Payload(0, 0, {"w": torch.tensor([value])}), 1, Payload(0, 0, {}))
    assert aggregate.take()["w"].item() == pytest.approx(mean)
    for again in (aggregate.take, aggregate.take_sums):
        with pytest.raises(RefusedError, match="no site's update was accepted"):
            again()


def test_sums_and_single_results_are_forgotten_too() -> None:
    """Sums are whole steps of 2^-36; results come in the order of the sites' names."""
    update, sums, single = Payload(0, 0, {"w": torch.tensor([0.5])}), RoundAggregate(FedIT()), RoundAggregate(LoraFair())
    for name, weight in (("b", 3), ("a", 1)):
        sums.add(SiteInfo(name, 1), update, weight, update)
        single.add(SiteInfo(name, 1), update, weight, update)
    assert sums.take_sums()["w"].item() == 2**37
    with pytest.raises(RefusedError, match="no site's update was accepted"):
        sums.take_sums()
    assert [(name, result.weight) for name, result in single.take().items()] == [("a", 1), ("b", 3)]
    assert single.take() == {}


SITE_DP = {"unit": "site", "noise_multiplier": 1.0, "clip": 1.0}


@pytest.mark.parametrize(
    ("server", "strategy", "sections", "message"),
    [
        ({"optimizer": "sgd"}, "fedit", {}, r"server\.optimizer: 'sgd': expected 'momentum', 'adam' or 'yogi'"),
        (
            {"lr": 0.1},
            "fedit",
            {},
            r"server\.lr: 0\.1 is of optimizer momentum or adam or yogi; name one of them, or leave it out",
        ),
        ({"optimizer": "momentum", "tau": 0.1}, "fedit", {}, r"server\.tau: 0\.1 is of optimizer adam or yogi"),
        ({"trim": 0.2, "mean": "median"}, "fedit", {}, r"server\.trim: 0\.2 is of mean trimmed"),
        ({"trim": 0.5, "mean": "trimmed"}, "fedit", {}, r"server\.trim: 0\.5: expected less than 0\.5"),
        ({"optimizer": "adam"}, "lora_fair", {}, r"server: strategy 'lora_fair' merges sites' results one by one"),
        ({"mean": "median"}, "scaffold", {}, r"server: strategy 'scaffold' merges sites' results one by one"),
        ({"optimizer": "adam"}, {"name": "deer", "rebalance": True}, {}, r"server\.optimizer: 'adam': strategy 'deer' changes"),
        ({"mean": "median"}, "fedit", {"privacy": SITE_DP | {"trust": "central"}}, r"privacy\.trust: 'central': server\.mean"),
        (
            {"mean": "trimmed"},
            "fedit",
            {"federation": {"weighting": "samples"}},
            r"federation\.weighting: 'samples' with server",
        ),
        ({"optimizer": "adam"}, "local_only", {}, r"server: strategy 'local_only' sends the server nothing"),
        ({"mean": "median"}, "local_only", {}, r"server: strategy 'local_only' sends the server nothing"),
        ({"mean": "trimmed"}, "fedit", {"federation": {"max_weight": 9}}, r"federation\.max_weight: 9 with server\.mean"),
    ],
)
def test_what_has_no_meaning_is_refused_by_one_line(
    server: dict[str, Any], strategy: Any, sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        assemble_job(job_of(server, strategy, **sections))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("server", OPTIMIZERS, ids=lambda s: s["optimizer"])
def test_what_travels_untrained_is_no_descent(server: dict[str, Any]) -> None:
    """FedDBE's mean of features in round 0: the optimizer takes no step with it, its state stays, and the adapter does step."""
    job, mean = assemble_job(job_of(server, "feddbe")), torch.tensor([3.0, -4.0])
    lora = next(name for name in job.initial if name.endswith("lora_A"))
    state = ServerState(0, 0, {lora: torch.zeros(2), MEAN: torch.zeros(2)}, {})
    after = aggregate_results(job, state, {lora: mean.double(), MEAN: mean.double()})
    assert torch.equal(after.shared[MEAN], mean)
    assert torch.equal(after.shared[lora], server_optimizer_step(job.config.server, state, {lora: mean})[1][lora].float())
    assert not torch.equal(after.shared[lora], mean)
    assert not any(MEAN in name for name in after.optimizer)


def test_noise_at_the_sites_goes_with_a_median_and_optimizers_go_with_any_noise() -> None:
    assert job_of({"mean": "median"}, privacy=SITE_DP).weighting == "uniform"
    assemble_job(job_of({"optimizer": "adam"}, privacy=SITE_DP | {"trust": "central"}))


def server_run(config: JobConfig, folder: Path, orders: list[list[int]], resume: bool = False) -> Coordinator:
    """Return the server after rounds in which sites answer in these orders; an update depends on round and site only."""
    made = Coordinator(assemble_job(config), folder, lambda event: None, resume)
    for index in range(3):
        made.welcome(Hello(f"site-{index}", 10 * (index + 1), resume, __version__))
    for order in orders:
        made.start()
        for index in order:
            place, generator = (made.state.round, made.state.phase), torch.Generator().manual_seed(7 * made.state.round + index)
            names = made.job.strategy.names(made.job.initial, Role.SHARED, *place)
            drawn = {n: 0.01 * torch.randn(made.job.initial[n].shape, generator=generator) for n in names}
            assert made.accept(f"site-{index}", Payload(*place, drawn)) is None
        made.conclude()
    made.close()
    return made


@pytest.mark.parametrize("server", [OPTIMIZERS[0], OPTIMIZERS[2] | {"mean": "trimmed", "trim": 0.3}], ids=["momentum", "yogi"])
def test_a_resumed_run_is_an_uninterrupted_one_whatever_the_order(server: dict[str, Any], tmp_path: Path) -> None:
    config = job_of(server)
    whole = server_run(config, tmp_path / "whole", [[0, 1, 2]] * 3)
    server_run(config, tmp_path / "broken", [[2, 0, 1]])
    rest = server_run(config, tmp_path / "broken", [[1, 2, 0], [2, 1, 0]], resume=True)
    assert whole.state.optimizer
    assert whole.state.optimizer.keys() == rest.state.optimizer.keys()
    assert all(torch.equal(rest.state.optimizer[n], t) for n, t in whole.state.optimizer.items())
    assert all(torch.equal(rest.state.shared[n], t) for n, t in whole.state.shared.items())
