"""FedSCA: what travels, who gets what of whom, absent sites, ablations, groups of sites that find each other."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from consilium.adapters.bottleneck import PLACES
from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.core.errors import ConfigError
from consilium.core.messages import Payload, SiteInfo, Tensors
from consilium.data.synthetic.phantoms import make_phantoms
from consilium.federation.job_assembly import assemble_job
from consilium.runtime.engine import simulate
from consilium.server.aggregation import RoundAggregate
from consilium.strategies.fedsca import MATRIX, FedSCA, mixture_weights, similarities, smallest_isolating_alpha
from consilium.strategies.strategy import LocalStep, Role, ServerState, SiteResult
from tests.conftest import Snapshot, small_config, strategy_of, training_only

NAMES = [f"image_encoder.blocks.{i}.{place}.down.weight" for i in range(2) for place in PLACES]


def start(seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(2, 3, generator=generator) for name in NAMES}


def exchange(
    strategy: FedSCA, state: ServerState, moves: dict[str, float], weights: dict[str, int] | None = None
) -> ServerState:
    """Let every site in `moves` set its low adapters to that constant."""
    aggregate = RoundAggregate(strategy)
    for name, value in moves.items():
        sent = strategy.payload(state, SiteInfo(name, 1))
        low = [n for n in NAMES if strategy.role(n, 0, 0) is Role.SHARED]
        end = {n: torch.full((2, 3), value) for n in low}
        update = {n: end[n] - sent.tensors[n] for n in low}
        aggregate.add(SiteInfo(name, 1), Payload(state.round, 0, update), (weights or {}).get(name, 1), sent)
    return strategy.aggregate(state, aggregate.take())


def received(strategy: FedSCA, state: ServerState, name: str) -> float:
    return float(strategy.payload(state, SiteInfo(name, 1, joined=True)).tensors[NAMES[0]].mean())


@pytest.mark.parametrize(("low", "expected"), [(1, NAMES[:1]), (4, NAMES[:4]), (0, NAMES), (6, NAMES)])
def test_only_the_lowest_adapters_travel(low: int, expected: list[str]) -> None:
    strategy = FedSCA(low=low)
    state = strategy.initialize(start())
    assert strategy.names(start(), Role.SHARED, 0, 0) == expected
    assert list(strategy.payload(state, SiteInfo("a", 1, joined=True)).tensors) == expected
    assert strategy.payload(state, SiteInfo("a", 1)).tensors.keys() == start().keys()
    assert strategy.role("mask_decoder.iou_token.weight", 0, 0) is Role.LOCAL


def test_what_it_cannot_place_or_does_not_have_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cannot place adapter tensor 'x\.lora_A'"):
        FedSCA().role("x.lora_A", 0, 0)
    with pytest.raises(ConfigError, match=r"strategy\.low: 7: .*6 adapters"):
        FedSCA(low=7).initialize(start())
    with pytest.raises(ConfigError, match=r"strategy\.alpha: -1"):
        strategy_of({"name": "fedsca", "alpha": -1})


@pytest.mark.parametrize("similarity", ["l2", "l1", "cosine", "inner"])
def test_the_least_similar_site_gets_the_least_weight(similarity: str) -> None:
    """PITFALL: + distance instead of - distance."""
    strategy = FedSCA(low=1, similarity=similarity)
    state = exchange(strategy, strategy.initialize(start()), {"a": 1.0, "b": 1.1, "c": -5.0})
    matrix = state.matrices[MATRIX]
    assert torch.allclose(matrix.sum(1), torch.ones(3, dtype=torch.float64))
    assert matrix[0, 2] == matrix[0].min() < matrix[0, 1]
    assert matrix[2].argmax() == 2


def test_similarities_by_hand() -> None:
    flat = torch.tensor([[0.0, 3.0], [4.0, 0.0]], dtype=torch.float64)
    assert similarities(flat, "l2", False).tolist() == [[0.0, -5.0], [-5.0, 0.0]]
    assert similarities(flat, "l1", False).tolist() == [[0.0, -7.0], [-7.0, 0.0]]
    assert similarities(flat, "l2", True).tolist() == [[0.0, -1.0], [-1.0, 0.0]]
    assert similarities(flat, "inner", False).tolist() == [[9.0, 0.0], [0.0, 16.0]]
    assert torch.allclose(similarities(0.1 * flat, "cosine", False), torch.eye(2, dtype=torch.float64))
    slanted = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)  # products 5, 11 and 25: 11 off the diagonal
    expected = torch.tensor([[5 / 11, 1.0], [1.0, 25 / 11]], dtype=torch.float64)
    torch.testing.assert_close(similarities(slanted, "inner", True), expected)
    assert similarities(flat[:1], "l2", True).tolist() == [[0.0]]
    assert similarities(flat[[0, 0]], "l2", True).tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_alpha_means_the_same_whatever_the_models_size() -> None:
    flat = torch.randn(4, 7, dtype=torch.float64)
    wide = flat.repeat(1, 100)
    assert torch.allclose(similarities(flat, "l2", True), similarities(wide, "l2", True))
    assert not torch.allclose(similarities(flat, "l2", False), similarities(wide, "l2", False))


def test_every_site_receives_its_own_mixture_of_values() -> None:
    strategy = FedSCA(low=1, alpha=0.5)
    state = exchange(strategy, strategy.initialize(start()), {"a": 0.0, "b": 1.0, "c": 4.0})
    wanted = (state.matrices[MATRIX] @ torch.tensor([0.0, 1.0, 4.0], dtype=torch.float64)).tolist()
    assert [received(strategy, state, name) for name in "abc"] == pytest.approx(wanted, abs=1e-5)
    assert len({received(strategy, state, n) for n in "abc"}) == 3
    again = exchange(strategy, state, {"a": 2.0, "b": 2.0, "c": 2.0})  # updates are taken from each one's own start
    assert all(received(strategy, again, n) == pytest.approx(2.0, abs=1e-5) for n in "abc")


def test_data_size_counts_by_default_and_drops_out_of_the_printed_formula() -> None:
    weights, moves = {"a": 90, "b": 9, "c": 1}, {"a": 0.0, "b": 1.0, "c": 2.0}
    for prior, row in (("samples", [0.9, 0.09, 0.01]), ("literal", [1 / 3] * 3)):
        found = exchange(FedSCA(low=1, alpha=0.0, prior=prior), FedSCA(low=1).initialize(start()), moves, weights)
        assert torch.allclose(found.matrices[MATRIX], torch.tensor(row, dtype=torch.float64).expand(3, 3), atol=1e-12)


def test_the_plain_mean_is_an_ablation() -> None:
    strategy = FedSCA(low=0, mixture="mean", pull=0.0)
    state = exchange(strategy, strategy.initialize(start()), {"a": 1.0, "b": 5.0}, {"a": 3, "b": 1})
    assert received(strategy, state, "a") == received(strategy, state, "b") == pytest.approx(2.0)


def test_an_absent_site_gets_a_mixture_of_what_is_known_and_others_ignore_it() -> None:
    strategy = FedSCA(low=1, alpha=0.1)
    state = exchange(strategy, strategy.initialize(start()), {"a": 0.0, "b": 1.0, "c": 2.0})
    later = exchange(strategy, state, {"a": 0.0, "b": 1.0})
    matrix = later.matrices[MATRIX]
    assert (matrix[:2, 2] == 0).all()
    assert (matrix[2] > 0).all()
    assert later.reported == {"a": 1, "b": 1, "c": 0}
    assert received(strategy, later, "c") > received(strategy, later, "b") - 1
    assert received(strategy, later, "new") == pytest.approx(0.5)  # nothing known of it: this round's mean


def test_an_absent_site_counts_with_its_last_weight_and_others_with_their_new_ones() -> None:
    """With alpha 0 rows are the priors: 4 and 1 of 5 for those present, 4, 1 and 5 of 10 for the absent site c."""
    strategy, moves = FedSCA(low=1, alpha=0.0), {"a": 0.0, "b": 1.0}
    state = exchange(strategy, strategy.initialize(start()), moves | {"c": 2.0}, {"a": 1, "b": 2, "c": 5})
    matrix = exchange(strategy, state, moves, {"a": 4, "b": 1}).matrices[MATRIX]
    wanted = [[0.8, 0.2, 0.0], [0.8, 0.2, 0.0], [0.4, 0.1, 0.5]]
    torch.testing.assert_close(matrix, torch.tensor(wanted, dtype=torch.float64))


def test_order_of_arrival_changes_nothing() -> None:
    strategy, moves = FedSCA(low=2), {"a": 0.3, "b": 1.7, "c": -2.0}
    states = [
        exchange(strategy, strategy.initialize(start()), dict(order)) for order in (moves.items(), [*moves.items()][::-1])
    ]
    assert torch.equal(states[0].matrices[MATRIX], states[1].matrices[MATRIX])
    assert all(torch.equal(states[0].shared[n], states[1].shared[n]) for n in states[0].shared)


def test_the_pull_is_minus_the_cosine_over_all_low_adapters_together() -> None:
    strategy, anchors = FedSCA(low=2, pull=0.5), start()
    params = {n: t.clone().requires_grad_() for n, t in start(1).items()}
    loss = strategy.penalty(LocalStep(params, anchors, {}))
    small = [{n: 1e-3 * t.detach() for n, t in values.items()} for values in (params, anchors)]
    assert strategy.penalty(LocalStep(*small, {})).item() == pytest.approx(loss.item(), rel=1e-4)
    now, then = (torch.cat([v[n].detach().flatten() for n in NAMES[:2]]) for v in (params, anchors))
    assert loss.item() == pytest.approx(-0.5 * float(now @ then / (now.norm() * then.norm())), rel=1e-5)
    loss.backward()
    assert params[NAMES[1]].grad.abs().sum() > 0
    assert params[NAMES[2]].grad is None
    still = {n: t.clone().requires_grad_() for n, t in anchors.items()}
    strategy.penalty(LocalStep(still, anchors, {})).backward()
    assert still[NAMES[0]].grad.abs().max() < 1e-6
    assert FedSCA(pull=0.0).penalty(LocalStep(params, anchors, {})) is None


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SiteConfig]:
    """Four sites, two and two from one camera and one rater."""
    root, sites = tmp_path_factory.mktemp("groups"), {}
    for group in (2, 5):
        whole = make_phantoms(root / f"group-{group}", "nuclei", f"site-{group}", 3, 24, 0, 16, 64, 1.0, 1.0)
        content = json.loads(whole.read_text())
        for half in range(2):
            path = whole.with_name(f"half-{half}.json")
            path.write_text(json.dumps({split: content[split][half::2] for split in ("training", "test")}))
            sites[f"group-{group}-{half}"] = SiteConfig(datalist=path)
    return sites


def run_groups(sites: dict[str, SiteConfig], folder: Path, **options: object) -> tuple[torch.Tensor, float]:
    """Return the last matrix and the mean test Dice of what the sites receive."""
    raw = small_config("fedsca", rounds=2, local_steps=12, lr=1e-2, batch_size=4).model_dump()
    raw |= {"strategy": {"name": "fedsca", "low": 0, "pull": 0.0, **options}, "task": {"classes": ["nucleus"]}, "data": {}}
    coordinator = simulate(assemble_job(JobConfig.model_validate(raw)), sites, folder, lambda event: None)
    results = json.loads((folder / "results.json").read_text())
    dice = sum(r["test/global/dice"] for r in results.values()) / len(results)
    return coordinator.state.matrices[MATRIX], dice


@pytest.mark.long
def test_groups_of_sites_find_each_other_and_beat_the_plain_mean(groups: dict[str, SiteConfig], tmp_path: Path) -> None:
    matrix, ours = run_groups(groups, tmp_path / "sgca", alpha=2.0)
    _, mean = run_groups(groups, tmp_path / "mean", mixture="mean")
    across = torch.cat([matrix[:2, 2:].flatten(), matrix[2:, :2].flatten()])
    within = torch.stack([matrix[0, 1], matrix[1, 0], matrix[2, 3], matrix[3, 2]])
    assert across.max() < 0.02
    assert within.min() > 0.05
    assert ours > mean + 0.03


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    config = training_only(small_config({"name": "fedsca", "low": 2}))
    sites, folder = {f"site-{i}": SiteConfig() for i in (1, 2)}, tmp_path / "run"
    snapshot = Snapshot(folder, lambda event: event["event"] == "round" and event["round"] == 1)
    whole, finished = simulate(assemble_job(config), sites, folder, snapshot), snapshot.restore()
    events: list[dict] = []
    again = simulate(assemble_job(config), sites, folder, events.append, resume=True)
    assert {e["round"] for e in events if e["event"] == "step"} == {1}
    assert all(torch.equal(again.state.sites[s][n], t) for s, values in whole.state.sites.items() for n, t in values.items())
    assert torch.equal(again.state.matrices[MATRIX], whole.state.matrices[MATRIX])
    assert (again.state.reported, again.state.weights) == (whole.state.reported, whole.state.weights)
    for run in (finished, folder):
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert [e["round"] for e in lines if e["event"] == "figure"] == [0, 1]
        assert all(e["staleness"] == {"site-1": 0, "site-2": 0} for e in lines if e["event"] == "figure")
        assert (run / f"{MATRIX}.png").stat().st_size > 5000


def test_noise_on_sums_is_refused_with_a_server_that_looks_at_sites() -> None:
    raw = small_config("fedsca").model_dump()
    privacy = {"unit": "site", "epsilon": 3, "clip": 1.0}
    assert assemble_job(JobConfig.model_validate(raw | {"privacy": privacy}))
    with pytest.raises(ConfigError, match=r"privacy\.trust: 'central': strategy 'fedsca'"):
        assemble_job(JobConfig.model_validate(raw | {"privacy": privacy | {"trust": "central"}}))


def test_from_which_alpha_a_site_mixes_nobody() -> None:
    """10 and 30 samples: v = (1/4 - a/2, 3/4) is (0, 1) projected from a = 1 on; the smaller's from a = 3 on."""
    prior = torch.tensor([0.25, 0.75], dtype=torch.float64)
    similar = torch.tensor([[0.0, -1.0], [-1.0, 0.0]], dtype=torch.float64)
    assert smallest_isolating_alpha(prior, similar).tolist() == pytest.approx([3.0, 1.0])
    assert mixture_weights(prior, similar, 1.0)[1].tolist() == pytest.approx([0.0, 1.0])
    assert mixture_weights(prior, similar, 0.9)[1].tolist() == pytest.approx([0.025, 0.975])  # by hand: (-0.2, 0.75) + 0.225


def test_the_limit_is_where_an_independent_solver_puts_it() -> None:
    draw = torch.Generator().manual_seed(0)
    flat, prior = torch.randn(5, 9, generator=draw, dtype=torch.float64), torch.tensor([1, 2, 3, 4, 10.0]).double() / 20
    similar = similarities(flat, "l2", True)
    for site, limit in enumerate(smallest_isolating_alpha(prior, similar).tolist()):
        for alpha, alone in ((limit * 0.98, False), (limit * 1.02, True)):
            found = minimize(
                lambda w, a=alpha, s=site: ((w - prior.numpy()) ** 2).sum() - a * (w * similar[s].numpy()).sum(),
                np.full(5, 0.2), bounds=[(0, 1)] * 5, constraints={"type": "eq", "fun": lambda w: w.sum() - 1}, tol=1e-14,
            )  # fmt: skip
            assert (found.x[site] > 1 - 1e-5) == alone


def test_a_round_says_who_mixes_nobody(caplog: pytest.LogCaptureFixture) -> None:
    for prior, limits in (([0.5, 0.5], [math.inf] * 2), ([1.0, 0.0], [0, math.inf])):  # equal sites; one with all weight
        assert smallest_isolating_alpha(torch.tensor(prior), torch.zeros(2, 2)).tolist() == limits
    strategy, name = FedSCA(low=0, alpha=1.0), "image_encoder.blocks.0.adapter_mlp.up.bias"
    state = strategy.initialize({name: torch.zeros(2)})
    sent = Payload(0, 0, {name: torch.zeros(2)})
    results = {
        site: SiteResult(Payload(0, 0, {name: torch.tensor(value)}), weight, sent, SiteInfo(site, weight))
        for site, weight, value in (("a", 10, [1.0, 0.0]), ("b", 30, [0.0, 1.0]))
    }
    assert strategy.diagnostics(state, results) == pytest.approx(
        {"collaboration/alone": 1.0, "collaboration/alone_from_alpha": 1.0}
    )
    assert "strategy.alpha: 1: in round 1 these sites receive only their own upload: b; with alpha below 1 every" in caplog.text
    caplog.clear()
    assert strategy.diagnostics(state, {"a": results["a"]}) == {}  # a site by itself has nobody to mix
    assert replace(strategy, mixture="mean").diagnostics(state, results) == {}
    assert caplog.text == ""


def test_a_state_that_never_met_a_site_broadcasts_the_start() -> None:
    strategy = FedSCA()
    state = replace(strategy.initialize(start()), round=3)
    assert torch.equal(strategy.payload(state, SiteInfo("late", 1)).tensors[NAMES[0]], start()[NAMES[0]])
    assert math.isfinite(received(strategy, state, "late"))
