"""FedHera: the server's exactness, ranks within budgets, what travels, the gate, whole runs."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from consilium.core.messages import Payload, SiteInfo
from consilium.server.aggregation import RoundAggregate
from consilium.strategies.fedhera import FedHera
from consilium.strategies.flexlora import FlexLoRA
from consilium.strategies.strategy import Role, SiteResult
from consilium.strategies.unequal_ranks import Tier, factors, information_gain, shapes, stored_spectra
from tests.strategies.unequal import LAYERS, TIERS, answer, exchange, initial, play, product, products, whole

SITES = [f"site-{i}" for i in range(10)]


def gate(completed: int, score: float | None, age: int, schedule: str = "paper") -> float:
    """Return Eq. 12 as printed, or as in the authors' code, with tau 2 and decay 0.9; before a first report s is 0."""
    if score is None:
        return 1 - math.exp(-completed / 2)
    exponent = (1 + score) * 0.9**age if schedule == "paper" else 1 + score * 0.9**age
    return 1 - math.exp(-completed / 2 * exponent)


def hera(**options: object) -> FedHera:
    return FedHera(tiers={n: Tier(**t) for n, t in TIERS.items()}, **options)


def sizes(payload: Payload) -> dict[str, tuple[int, int]]:
    """Return (trained, tail) ranks by layer."""
    tails = {layer: len(payload.tensors.get(f"{layer}.tail_A", ())) for layer in shapes(payload.tensors)}
    return {layer: (len(payload.tensors[f"{layer}.lora_A"]), tail) for layer, tail in tails.items()}


LARGE = {"model.layers.0.q_proj": (120, 90), "model.layers.1.q_proj": (100, 140)}


@pytest.mark.parametrize("aggregation", ["residual", "literal"])
def test_after_ten_rounds_the_update_equals_a_dense_float64_reference(aggregation: str) -> None:
    strategy = FedHera(aggregation=aggregation, profile="skewed")
    state = strategy.initialize(initial(layers=LARGE, rank=64))
    dense = {layer: torch.zeros(shape, dtype=torch.float64) for layer, shape in LARGE.items()}
    for _ in range(10):
        uploads = exchange(strategy, state, SITES)
        total = sum(upload.weight for upload in uploads.values())
        for layer in LARGE:
            for upload in uploads.values():
                (b0, a0), (db, da) = (factors(p.tensors, layer) for p in (upload.sent, upload.update))
                b, a = b0.double() + db.double(), a0.double() + da.double()
                start = b0.double() @ a0.double() if aggregation == "residual" else 0.0
                dense[layer] += upload.weight / total * (b @ a - start)
        state = strategy.aggregate(state, uploads)
        for layer, reference in dense.items():
            assert torch.linalg.norm(whole(state, layer) - reference) < 1e-5 * torch.linalg.norm(reference)
            true = torch.linalg.svdvals(reference)[:64]
            assert float((stored_spectra(state)[layer].values - true).abs().max() / true[0]) < 1e-5


def test_the_round_starts_alike_and_smaller_ranks_are_prefixes() -> None:
    strategy, start = hera(), initial()
    state = strategy.initialize(start)
    for name in SITES:
        sent = strategy.payload(state, SiteInfo(name, 1))
        tier = strategy.draw_tier(name)
        assert sizes(sent) == {layer: (tier.train, 0) for layer in LAYERS}  # no tail while there is no update
        for layer in LAYERS:
            b, a = factors(sent.tensors, layer)
            assert torch.equal(a, start[f"{layer}.lora_A"][: len(a)])
            assert not b.any()


@pytest.mark.parametrize("allocation", ["water_filling", "literal", "even"])
def test_ranks_stay_within_budgets_and_add_up_to_the_truncated_update(allocation: str) -> None:
    strategy = hera(allocation=allocation, gate="open")
    state = play(strategy, play(strategy, strategy.initialize(initial()), SITES), SITES[:5])
    total = sum(map(sum, LAYERS.values()))
    for name in SITES:
        site, tier = SiteInfo(name, 1), strategy.draw_tier(name)
        sent = strategy.payload(state, site)
        ranks = sizes(sent)
        assert strategy.download_numbers(state, site) == tier.download * 30
        assert sum((r + k) * sum(LAYERS[layer]) for layer, (r, k) in ranks.items()) <= tier.download * total
        assert sum(r * sum(LAYERS[layer]) for layer, (r, _) in ranks.items()) <= tier.train * total
        for layer, (rank, tail) in ranks.items():
            u, values, v = torch.linalg.svd(whole(state, layer), full_matrices=False)
            kept = rank + tail
            expected = u[:, :kept] * values[:kept] @ v[:kept]
            torch.testing.assert_close(product(sent.tensors, layer), expected, rtol=1e-4, atol=1e-5)


def test_a_site_downloads_at_most_all_ranks_and_the_head() -> None:
    """Layers of 16 and 14 numbers a rank have 6 ranks each: 180 numbers, and 5 of the head. 40 ranks would be 1200."""
    strategy, head = hera(), {"head.weight": torch.zeros(1, 4), "head.bias": torch.zeros(1)}
    state = strategy.initialize(initial() | head)
    numbers = [strategy.download_numbers(state, SiteInfo("a", 1, capacity={"download": ranks})) for ranks in (2.0, 6.0, 40.0)]
    assert numbers == [60 + 5, 180 + 5, 180 + 5]


def test_the_spectra_hold_as_many_ranks_as_the_largest_adapter() -> None:
    state = hera().initialize(initial(layers={"model.layers.0.q_proj": (9, 7), "model.layers.1.q_proj": (3, 8)}))
    assert [len(found.values) for found in stored_spectra(state).values()] == [6, 3]


def test_a_site_that_changes_nothing_changes_nothing_whatever_the_gate() -> None:
    for options in ({"gate": "open"}, {"gate": "paper"}, {"gate": "neutral"}):
        strategy = hera(**options)
        state = play(strategy, strategy.initialize(initial()), SITES)
        after = play(strategy, state, SITES[:3], size=0.0)
        assert all(torch.equal(whole(state, layer), whole(after, layer)) for layer in LAYERS)


def test_a_direction_without_an_update_can_learn() -> None:
    strategy = hera()
    state = play(strategy, strategy.initialize(initial()), ["site-0"])  # rank 1 to 4 of it
    for layer, (rank, _) in sizes(
        sent := strategy.payload(state, SiteInfo("big", 1, capacity={"time": 6, "memory": 6}))
    ).items():
        b, a = factors(sent.tensors, layer)
        blank = ~b.any(0)
        assert rank > len(stored_spectra(state)[layer].values.nonzero())
        assert blank.any()
        assert bool(a[blank].any(1).all())


def test_opposite_sites_are_scored_by_what_they_changed() -> None:
    strategy = hera(score="residual", profile={"medium": 1.0})
    state = play(strategy, strategy.initialize(initial()), SITES)
    aggregate = RoundAggregate(strategy)
    for name, weight, sign in (("many", 3, 1.0), ("few", 1, -1.0)):
        site = SiteInfo(name, weight)
        sent = strategy.payload(state, site)
        moved = {n: sign * 1e-3 * torch.ones_like(t) for n, t in sent.tensors.items() if ".lora_" in n}
        aggregate.add(site, Payload(state.round, 0, moved), weight, sent)
    after = strategy.aggregate(state, aggregate.take())
    scores = {name: float(after.sites[name]["alignment"]) for name in ("many", "few")}
    assert scores == {"many": pytest.approx(1, abs=0.01), "few": pytest.approx(-1, abs=0.01)}


def test_the_gate_opens_with_rounds_and_closes_for_absent_sites() -> None:
    strategy, neutral = hera(gate="paper"), hera(gate="neutral")
    state = strategy.initialize(initial())
    assert strategy.site_gate(state, "site-0") == 0
    state = play(strategy, state, SITES)
    score = float(state.sites["site-0"]["alignment"])
    assert strategy.site_gate(state, "site-0") == pytest.approx(gate(1, score, 0))
    for _ in range(2):
        state = play(strategy, state, SITES[1:])
    assert strategy.site_gate(state, "site-0") == pytest.approx(gate(3, score, 2))
    assert neutral.site_gate(state, "site-0") == pytest.approx(gate(3, score, 2, "neutral"))
    assert strategy.site_gate(state, "never") == pytest.approx(gate(3, None, 3))
    sent = strategy.payload(state, SiteInfo("site-0", 1))
    gates = {float(t) for n, t in sent.tensors.items() if n.endswith(".gate")}
    assert list(gates) == pytest.approx([gate(3, score, 2)], rel=1e-6)


def test_final_is_the_whole_download_to_use_without_a_gate() -> None:
    strategy = hera()
    state = play(strategy, strategy.initialize(initial()), SITES)
    site = SiteInfo("site-2", 1)
    final, sent = strategy.final(state, site), hera(gate="open").payload(state, site)
    assert not any("tail" in name for name in final.tensors)
    for layer, expected in products(sent.tensors).items():
        torch.testing.assert_close(product(final.tensors, layer), expected)


def test_diagnostics_are_what_they_say() -> None:
    strategy = hera()
    state = play(strategy, strategy.initialize(initial()), SITES)
    sent = {name: strategy.payload(state, SiteInfo(name, 1)) for name in SITES[:3]}
    able = {n: SiteInfo(n, 1, capacity={"memory": 5}) for n in sent}
    uploads = {n: SiteResult(answer(strategy, p, i), 1, p, able[n]) for i, (n, p) in enumerate(sent.items())}
    found = strategy.diagnostics(state, uploads)
    assert 0 < found["drift/cross"] < 2
    assert found["ranks/information_gain"] > 1
    trained = [[rank for rank, _ in sizes(p).values()] for p in sent.values()]
    numbers = sum(first * (9 + 7) + second * (6 + 8) for first, second in trained) / 3
    assert found["memory/saturation"] == pytest.approx(numbers / (5 * (9 + 7 + 6 + 8)))
    for layer in LAYERS:
        values = torch.linalg.svdvals(whole(state, layer)).square()
        kept = [sum(sizes(p)[layer]) for p in sent.values()]
        expected = sum(float(values[:k].sum() / values.sum()) for k in kept) / 3
        assert found[f"retained energy/{layer}"] == pytest.approx(expected, abs=1e-6)


def test_a_head_is_averaged() -> None:
    strategy = hera()
    state = strategy.initialize(initial() | {"head.weight": torch.zeros(2, 3)})
    aggregate = RoundAggregate(strategy)
    for name, weight, value in (("a", 1, 1.0), ("b", 3, 2.0)):
        site = SiteInfo(name, weight)
        sent = strategy.payload(state, site)
        update = replace(answer(strategy, sent, 1, 0.0))
        update.tensors["head.weight"] = torch.full((2, 3), value)
        aggregate.add(site, update, weight, sent)
    after = strategy.aggregate(state, aggregate.take())
    torch.testing.assert_close(after.shared["head.weight"], torch.full((2, 3), 1.75))


def site_products(upload: SiteResult, layer: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return (start, end, tail) of a site's layer, dense float64, the tail without its gate."""
    (b0, a0), (db, da) = (factors(p.tensors, layer) for p in (upload.sent, upload.update))
    start, end = b0.double() @ a0.double(), (b0.double() + db.double()) @ (a0.double() + da.double())
    tail = torch.zeros_like(start)
    if f"{layer}.tail_A" in upload.sent.tensors:
        tail = upload.sent.tensors[f"{layer}.tail_B"].double() @ upload.sent.tensors[f"{layer}.tail_A"].double()
    return start, end, tail


def test_replacing_aggregation_is_the_mean_of_whole_products_whatever_was_there() -> None:
    strategy = hera(aggregation="replace")
    state = play(strategy, play(strategy, strategy.initialize(initial()), SITES), SITES)
    results = exchange(strategy, state, SITES[:4])
    assert any(name.endswith("tail_A") for one in results.values() for name in one.sent.tensors)
    after = strategy.aggregate(state, results)
    total = sum(one.weight for one in results.values())
    for layer in LAYERS:
        parts = {name: site_products(one, layer) for name, one in results.items()}
        expected = sum(results[n].weight / total * (end + tail) for n, (_, end, tail) in parts.items())
        torch.testing.assert_close(whole(after, layer), expected, rtol=1e-5, atol=1e-6)


def test_the_cumulative_score_is_the_cosine_of_whole_products_with_the_new_update() -> None:
    strategy = hera(score="cumulative")
    state = play(strategy, play(strategy, strategy.initialize(initial()), SITES), SITES)
    results = exchange(strategy, state, SITES[:3])
    after = strategy.aggregate(state, results)
    update = torch.cat([whole(after, layer).flatten() for layer in LAYERS])
    for name, one in results.items():
        own = torch.cat([(sum(site_products(one, layer)[1:])).flatten() for layer in LAYERS])
        expected = float(own @ update / own.norm() / update.norm())
        assert float(after.sites[name]["alignment"]) == pytest.approx(expected, abs=1e-6)


def test_literal_aggregation_warns_and_grows_without_training() -> None:
    strategy = hera(aggregation="literal")
    assert "use residual" in strategy.traits.warnings[0]
    assert hera().traits.warnings == hera(aggregation="replace").traits.warnings == ()
    state = play(strategy, strategy.initialize(initial()), SITES)
    after = play(strategy, state, SITES, size=0.0)
    assert all(whole(after, layer).norm() > 1.2 * whole(state, layer).norm() for layer in LAYERS)


@pytest.mark.parametrize(("aggregation", "score"), [("residual", "product"), ("replace", "cumulative")])
def test_a_tier_that_trains_nothing_takes_part_without_a_say(aggregation: str, score: str) -> None:
    tiers, profile = {"none": Tier(0, 6), "some": Tier(2, 6)}, {"none": 0.5, "some": 0.5}
    strategy = FedHera(tiers=tiers, profile=profile, aggregation=aggregation, score=score)
    idle = next(n for n in SITES if strategy.draw_tier(n).train == 0)
    busy = next(n for n in SITES if strategy.draw_tier(n).train == 2)
    state = play(strategy, strategy.initialize(initial()), SITES)
    results = exchange(strategy, state, [busy, idle])
    assert all(len(results[idle].update.tensors[f"{layer}.lora_A"]) == 0 for layer in LAYERS)
    found = strategy.diagnostics(state, results)
    assert all(math.isfinite(value) for value in found.values())
    assert found["ranks/information_gain"] == information_gain(results[busy].sent)  # of the sites that train
    trained = sum(rank * sum(LAYERS[layer]) for layer, (rank, _) in sizes(results[busy].sent).items())
    assert found["memory/saturation"] == pytest.approx((trained / (2 * 30) + 1) / 2)  # the idle one leaves nothing unused
    assert strategy.diagnostics(state, {idle: results[idle]})["ranks/information_gain"] == 0
    after = strategy.aggregate(state, results)
    for layer in LAYERS:
        (start, end, tail), (_, _, idle_tail) = (site_products(results[n], layer) for n in (busy, idle))
        mean = (end + tail + 2 * idle_tail) / 3
        expected = mean if aggregation == "replace" else whole(state, layer) + end - start
        torch.testing.assert_close(whole(after, layer), expected, rtol=1e-5, atol=1e-6)
    assert idle not in after.sites
    quiet = strategy.aggregate(state, {idle: results[idle]})
    if aggregation == "residual":
        assert all(torch.equal(whole(quiet, layer), whole(state, layer)) for layer in LAYERS)


def test_random_ranks_differ_by_site_and_round_and_are_the_same_again() -> None:
    strategy = hera(allocation="random", profile={"high": 1.0})
    state = play(strategy, strategy.initialize(initial()), SITES)
    drawn = [strategy.download_and_train_ranks(state, SiteInfo(name, 1)) for name in SITES]
    assert drawn == [strategy.download_and_train_ranks(state, SiteInfo(name, 1)) for name in SITES]
    assert len({str(ranks) for ranks in drawn}) > 1
    assert drawn != [strategy.download_and_train_ranks(replace(state, round=9), SiteInfo(name, 1)) for name in SITES]


def test_raw_energies_compete_across_layers() -> None:
    """Layers of squares (100, 60, 60, 60) and (1, .9, .8) at equal costs and a budget of 4: shares of each layer's own sum
    (.357, .214, ...) and (.370, .333, .296) give ranks 1 and 3, which keep 102.7; raw squares give 4 and 0, which keep 280.
    """
    layers = {"model.layers.0.q_proj": (4, 4), "model.layers.1.q_proj": (4, 4)}
    squares = {"model.layers.0.q_proj": [100.0, 60, 60, 60], "model.layers.1.q_proj": [1.0, 0.9, 0.8, 0]}
    kept = {}
    for energy in ("normalized", "raw"):
        strategy = FedHera(energy=energy, tiers={"all": Tier(2, 2)}, profile={"all": 1.0})
        state = strategy.initialize(initial(layers=layers, rank=4))
        for layer, values in squares.items():
            state.matrices[f"{layer}.values"] = torch.tensor(values, dtype=torch.float64).sqrt()
            state.matrices[f"{layer}.energy"] = torch.tensor([sum(values), 0.0], dtype=torch.float64)
        download, _ = strategy.download_and_train_ranks(state, SiteInfo("a", 1))
        kept[energy] = list(download.values())
    assert kept == {"normalized": [1, 3], "raw": [4, 0]}


def test_one_round_at_full_rank_equals_flexlora() -> None:
    layers, sites = {"model.layers.0.q_proj": (5, 5)}, ["a", "b", "c"]
    ours, theirs = (cls(tiers={"all": Tier(5, 5)}, profile={"all": 1.0}) for cls in (FedHera, FlexLoRA))
    start = initial(layers=layers, rank=5)
    first, second = (play(strategy, strategy.initialize(start), sites) for strategy in (ours, theirs))
    layer = next(iter(layers))
    torch.testing.assert_close(whole(first, layer), whole(second, layer))
    sent = (strategy.payload(state, SiteInfo("a", 1)) for strategy, state in ((ours, first), (theirs, second)))
    torch.testing.assert_close(*(product(payload.tensors, layer) for payload in sent), rtol=1e-4, atol=1e-6)


def test_only_the_trained_prefix_leaves() -> None:
    strategy = hera()
    state = play(strategy, strategy.initialize(initial()), SITES)
    sent = strategy.payload(state, SiteInfo("site-1", 1))
    assert any(name.endswith("tail_A") for name in sent.tensors)
    update = answer(strategy, sent, 0)
    assert update.tensors.keys() == set(strategy.names(sent.tensors, Role.SHARED, 1, 0))
    assert all(name.rpartition(".")[2].startswith("lora_") for name in update.tensors)
