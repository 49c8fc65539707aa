"""The global update: exact composition against a float64 dense reference, spectra with honest errors, sites' factors."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from consilium.core.linalg import lanczos as certified, lowrank
from consilium.core.linalg.lowrank import (
    Change,
    Spectrum,
    Update,
    add,
    balanced_factors,
    spectra,
    spectrum,
    weighted_sum_of_changes,
    weighted_sum_of_products,
    zero_update,
)

TIERS = [(4, 8)] * 3 + [(8, 16)] * 5 + [(12, 24)] * 2
SCALE = 2.0


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def shaped(rows: int, columns: int, values: Tensor, seed: int = 0) -> Tensor:
    """Return a float32 matrix with these singular values."""
    u = torch.linalg.qr(randn(rows, len(values), seed=seed))[0]
    v = torch.linalg.qr(randn(columns, len(values), seed=seed + 1))[0]
    return ((u * values) @ v.T).float()


def as_dense(matrix: Tensor) -> Update:
    rows, columns = matrix.shape
    return Update(matrix.new_zeros(rows, 0), matrix.new_zeros(0, columns), matrix)


def as_factors(matrix: Tensor, rank: int) -> Update:
    u, s, vt = torch.linalg.svd(matrix.double(), full_matrices=False)
    return Update((u[:, :rank] * s[:rank]).float(), vt[:rank].float())


def whole(update: Update) -> Tensor:
    return update.left.double() @ update.right.double() if update.dense is None else update.dense.double()


def product(found: Spectrum) -> Tensor:
    return found.left.double() * found.values @ found.right.double()


def trained(found: Spectrum, tier: tuple[int, int], weight: float, seed: int) -> Change:
    """Return what a site sends back of its download: its prefix, moved."""
    out, into = found.left.shape[0], found.right.shape[1]
    b, a = balanced_factors(found, tier[1], SCALE, randn(64, into, seed=9).float() / 8)
    start = b[:, : tier[0]], a[: tier[0]]
    moved = (
        start[0] + 0.05 * randn(out, tier[0], seed=seed).float(),
        start[1] + 0.05 * randn(tier[0], into, seed=seed + 1).float(),
    )
    return Change(weight, start, moved)


@pytest.mark.parametrize("shape", [(200, 160), (160, 330), (560, 520)])
def test_ten_rounds_of_ten_sites_are_exact(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Through both states: factors first, dense after some rounds; the third shape by Lanczos with its certificate."""
    monkeypatch.setattr(certified, "LIMIT", 0.9)
    update, reference = zero_update(*shape), torch.zeros(*shape, dtype=torch.float64)
    dense = []
    for number in range(10):
        found = spectrum(update, 64)
        changes = [trained(found, tier, 0.1, 1000 * number + 10 * i) for i, tier in enumerate(TIERS)]
        update = add(update, weighted_sum_of_changes(changes, SCALE))
        for c in changes:
            reference += c.weight * SCALE * (c.end[0].double() @ c.end[1].double() - c.start[0].double() @ c.start[1].double())
        dense.append(update.dense is not None)
        assert float((whole(update) - reference).norm() / reference.norm()) < 1e-5
    assert dense[-1]
    assert dense == sorted(dense)
    values = torch.linalg.svdvals(reference)[:64]
    found = spectrum(update, 64)
    assert float(((found.values - values).abs() / values).max()) < 1e-5
    assert found.energy == pytest.approx(float(reference.square().sum()), rel=1e-5)


def test_a_round_of_untrained_sites_changes_nothing() -> None:
    found = spectrum(as_dense(shaped(40, 30, torch.arange(20, 0, -1).double())), 16)
    b, a = balanced_factors(found, 16, SCALE, torch.zeros(16, 30))
    left, right = weighted_sum_of_changes([Change(0.5, (b[:, :r], a[:r]), (b[:, :r], a[:r])) for r in (4, 16)], SCALE)
    assert not (left @ right).any()


def test_sites_of_one_round_share_their_start_and_others_do_not() -> None:
    found = spectrum(as_dense(shaped(60, 50, torch.arange(40, 0, -1).double())), 32)
    changes = [trained(found, tier, 0.1, 10 * i) for i, tier in enumerate(TIERS)]
    left, right = weighted_sum_of_changes(changes, SCALE)
    assert left.shape[1] == len(right) == sum(train for train, _ in TIERS) + 12
    stale = trained(spectrum(as_dense(shaped(60, 50, torch.ones(40).double(), seed=5)), 32), (4, 8), 0.3, 77)
    both = weighted_sum_of_changes([*changes, stale], SCALE)
    assert both[0].shape[1] == left.shape[1] + 8
    alone = weighted_sum_of_changes([stale], SCALE)
    assert torch.allclose(both[0] @ both[1], left @ right + alone[0] @ alone[1], atol=1e-5)


def test_standard_aggregation_is_the_mean_of_products() -> None:
    changes = [Change(0.25, (), (randn(5, r, seed=r), randn(r, 4, seed=r + 1))) for r in (1, 3)]
    left, right = weighted_sum_of_products(changes, SCALE)
    assert torch.allclose(left @ right, sum(0.5 * c.end[0] @ c.end[1] for c in changes))


@pytest.mark.parametrize(("rows", "columns"), [(80, 60), (60, 80), (70, 70)])
def test_factored_and_dense_agree(rows: int, columns: int) -> None:
    matrix = shaped(rows, columns, 0.8 ** torch.arange(25).double())
    first, second = spectrum(as_factors(matrix, 25), 12), spectrum(as_dense(matrix), 12)
    assert torch.allclose(first.values, second.values, rtol=1e-6)
    assert torch.allclose(first.left, second.left, atol=1e-5)  # the same signs
    assert torch.allclose(first.right, second.right, atol=1e-5)
    assert first.energy == pytest.approx(second.energy, rel=1e-6)
    assert 0 < first.error < 1e-10  # both in float64: of rounding alone
    assert 0 < second.error < 1e-14
    assert first.rest(12) == pytest.approx(float((matrix.double() - product(first)).square().sum()), rel=1e-4)


J = torch.arange(1, 1025).double()
SPECTRA = {
    "geometric": 0.97**J,
    "slow": J**-0.75,
    "rank 20": torch.where(J <= 20, 1 / J, 0.0),
    "rank 300": torch.where(J <= 300, (301 - J).clamp(min=0) / 300, 0.0),
    "flat": torch.ones(1024).double(),
    "70 equal": torch.where(J <= 70, 1.0, 0.5),
}


@pytest.mark.parametrize("name", SPECTRA)
def test_the_error_is_honest_and_within_tolerance(name: str) -> None:
    """PITFALL: a fixed number of iterations is 2.6 % off on a flat spectrum, and nobody knows."""
    matrix = shaped(1024, 700, SPECTRA[name][:700])
    truth = torch.linalg.svdvals(matrix.double())[:32]
    found = spectrum(as_dense(matrix), 32)
    assert found.error <= 1.1e-5 * float(truth[0])
    assert float((truth - found.values).abs().max()) <= max(found.error, 4e-6 * float(truth[0]))
    assert found.error >= 1e-6 * float(truth[0])  # float32 knows no more
    best = matrix.double() - product(found)
    off = max(found.error, 4e-6 * float(truth[0])) * 2 * float(truth.sum())  # of the squares of values that are off by so much
    assert float(best.square().sum()) == pytest.approx(found.rest(32), rel=1e-3, abs=off)
    unit = found.left[:, found.values > 0].double()
    assert float((unit.T @ unit - torch.eye(unit.shape[1])).norm()) < 1e-4


def counted_widths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each Lanczos step adds the width of its basis."""
    steps, widths = certified._lanczos, list[int]()

    def counted(*given: Tensor) -> Iterator[Any]:
        for state in steps(*given):
            widths.append(state[2].shape[1])
            yield state

    monkeypatch.setattr(certified, "_lanczos", counted)
    return widths


def test_without_a_certificate_the_full_decomposition_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = shaped(600, 600, torch.ones(600).double())
    widths = counted_widths(monkeypatch)
    assert certified.certified_spectrum(matrix, 8, 1e-5, None) is None
    assert widths == [64, 128, 192, 256]  # it ends at 0.375 of 600
    easy = shaped(600, 600, 0.9 ** torch.arange(600).double())
    assert certified.certified_spectrum(easy, 8, 1e-5, None) is not None
    near = 0.9 ** torch.arange(600).double()
    near[8] = 0.99 * near[7]  # closer than the bound on what is left can tell: a ninth triplet is kept
    assert certified.certified_spectrum(shaped(600, 600, near), 8, 1e-5, None) is not None
    monkeypatch.setattr(certified, "_certify_spectrum", lambda *_: None)
    assert certified.certified_spectrum(easy, 8, 1e-5, None) is None
    assert torch.allclose(spectrum(as_dense(easy), 8).values, 0.9 ** torch.arange(8).double(), atol=1e-5)


def test_a_direction_that_was_missed_is_found_out() -> None:
    """A guess that is orthogonal to the first singular vector, taken as if it were the answer."""
    matrix = shaped(600, 550, 0.9 ** torch.arange(550).double())
    u, _, vt = torch.linalg.svd(matrix, full_matrices=False)
    assert certified._certify_spectrum(matrix, u[:, :60], vt[:60], 8, 1e-5) is not None
    assert certified._certify_spectrum(matrix, u[:, 1:60], vt[1:60], 8, 1e-5) is None


@pytest.mark.parametrize("power", [0.1, 0.5, 2.0])
def test_the_ceiling_is_above_the_norm_and_not_far(power: float) -> None:
    matrix = shaped(300, 400, torch.arange(1, 301).double() ** -power)
    top = float(torch.linalg.matrix_norm(matrix.double(), 2))
    assert top <= certified.residual_norm_bound(matrix, matrix.new_zeros(400, 0)) <= 1.1 * top
    _, values, vt = torch.linalg.svd(matrix)
    assert float(values[5]) <= certified.residual_norm_bound(matrix, vt[:5].T) <= 1.1 * float(values[5])


def test_the_ceiling_is_of_as_many_steps_and_probes_as_its_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    widths = counted_widths(monkeypatch)
    certified.residual_norm_bound(torch.eye(300, 400), torch.zeros(400, 0))
    assert widths == [16 * step for step in range(1, 15)]


def test_a_guess_saves_nothing_in_truth() -> None:
    matrix = shaped(600, 550, 0.95 ** torch.arange(550).double())
    cold = spectrum(as_dense(matrix), 16)
    for guess in (cold.right.T, randn(550, 3, seed=3)):
        warm = spectrum(as_dense(matrix), 16, start=guess)
        assert torch.allclose(cold.values, warm.values, rtol=1e-5)


@pytest.mark.parametrize("dense", [True, False])
def test_zero_and_rank_deficient_updates(dense: bool) -> None:
    empty = as_dense(torch.zeros(20, 30)) if dense else zero_update(20, 30)
    assert not spectrum(as_dense(torch.zeros(600, 560)), 8).values.any()
    found = spectrum(empty, 8)
    assert (found.left.shape, found.right.shape) == ((20, 8), (8, 30))
    assert not found.values.any()
    assert found.energy == found.rest(8) == 0
    three = shaped(20, 30, torch.tensor([3.0, 2.0, 1.0]).double())
    found = spectrum(as_dense(three) if dense else as_factors(three, 6), 8)
    assert (found.values > 0).tolist() == [True] * 3 + [False] * 5
    assert not found.right[3:].any()
    assert not found.left[:, 3:].any()
    initial = randn(8, 30, seed=1).float()
    b, a = balanced_factors(found, 8, SCALE, initial)
    assert torch.allclose(SCALE * b @ a, three, atol=1e-5)
    assert torch.equal(a[3:], initial[3:])
    assert not b[:, 3:].any()
    assert not bool((a == 0).all(1).any())


def test_values_of_up_to_four_roundings_are_none() -> None:
    eps = torch.finfo(torch.float32).eps
    found = spectrum(Update(torch.diag(torch.tensor([1.0, 4.5 * eps, 3.5 * eps])), torch.eye(3)), 3)
    assert (found.values > 0).tolist() == [True, True, False]


def test_more_ranks_than_the_layer_has_are_not_there() -> None:
    assert spectrum(zero_update(4, 6), 64).values.shape == (4,)


@pytest.mark.parametrize("rank", [1, 7, 16])
def test_refactored_ranks_nest_and_give_the_truncated_update(rank: int) -> None:
    matrix = shaped(40, 30, 0.9 ** torch.arange(30).double())
    found = spectrum(as_dense(matrix), 16)
    b, a = balanced_factors(found, rank, SCALE, torch.zeros(16, 30))
    assert float((matrix - SCALE * b @ a).double().square().sum()) == pytest.approx(found.rest(rank), rel=1e-4)
    wide = balanced_factors(found, 16, SCALE, torch.zeros(16, 30))
    assert torch.equal(b, wide[0][:, :rank])
    assert torch.equal(a, wide[1][:rank])


def test_the_same_input_gives_the_same_bits() -> None:
    layers = {f"layer{n}": as_dense(shaped(600, 560, 0.9 ** torch.arange(560).double(), seed=n)) for n in range(3)}
    layers["factored"] = as_factors(shaped(90, 80, 0.9 ** torch.arange(20).double()), 20)
    first, second = spectra(layers, 8), spectra(dict(reversed(layers.items())), 8)
    for name in layers:
        assert torch.equal(first[name].left, second[name].left)
        assert torch.equal(first[name].values, second[name].values)
    peaks = first["factored"].left.gather(0, first["factored"].left.abs().argmax(0, keepdim=True))
    assert bool((peaks > 0).all())
    assert torch.get_num_threads() >= 1


def test_layers_in_threads_are_the_layers_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, layers = [], {f"{n}": as_factors(shaped(50, 40, torch.ones(n).double(), seed=n), n) for n in (3, 5, 9)}
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    together = spectra(layers, 4)
    assert threads[-1] == 2  # put back
    assert set(threads[:-1]) == {1}
    on_device = spectra(layers, 4, "cpu")
    for name, found in together.items():
        assert torch.equal(found.values, spectrum(layers[name], 4).values)
        assert torch.equal(found.values, on_device[name].values)


@pytest.mark.parametrize(
    ("out", "into"),
    [(64, 48), (48, 64), (512, 512), (512, 50000), (513, 50000), (700, 600), (1024, 4096), (4096, 4096), (600, 60000)],
)
def test_the_dense_state_begins_where_it_takes_less_time_or_room(out: int, into: int) -> None:
    """A full SVD takes out * into * min(out, in) parts; over 512 of the smaller also passes of 512 + 16 * 14 columns."""
    cost, small = {"qr": 2.6e-10, "core": 1e-9, "pass": 0.9e-10, "full": 5e-10}, min(out, into)

    def factored(width: int) -> float:
        return cost["qr"] * (out + into) * width**2 + cost["core"] * width**3

    dense = cost["full"] * out * into * small
    if small > 512:
        dense = min(dense, cost["pass"] * out * into * (512 + 16 * 14) + factored(512))
    fits = out * into // (out + into)  # as many numbers as the dense matrix, or fewer
    assert lowrank.dense_width_threshold(out, into) == next((w for w in range(fits + 1) if factored(w) > dense), fits + 1)


def test_the_state_is_chosen_by_cost() -> None:
    width = lowrank.dense_width_threshold(4096, 4096)
    assert 200 < width < 2049
    assert lowrank.dense_width_threshold(64, 48) <= 28  # never more numbers than the dense matrix
    assert lowrank.dense_width_threshold(1024, 4096) == lowrank.dense_width_threshold(4096, 1024)
    update = add(zero_update(64, 48), (torch.ones(64, 5), torch.ones(5, 48)))
    assert update.dense is None
    whole = add(update, (torch.ones(64, 40), torch.ones(40, 48)))
    assert whole.dense is not None
    assert whole.left.numel() == whole.right.numel() == 0  # nothing is stored twice
    assert whole.shape == (64, 48)
    assert lowrank.TOLERANCE == 1e-5


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_alignments_are_those_of_the_dense_matrices(ranks: list[int], seed: int) -> None:
    layers = [[(randn(7, r, seed=seed + r + n), randn(r, 6, seed=seed + 2 * r + n)) for r in ranks] for n in (0, 50)]
    weights = [(n + 1) / sum(range(1, len(ranks) + 1)) for n in range(len(ranks))]
    flat = [torch.cat([(layer[i][0] @ layer[i][1]).flatten() for layer in layers]) for i in range(len(ranks))]
    mean = sum(w * f for w, f in zip(weights, flat, strict=True))
    expected = [float(torch.nn.functional.cosine_similarity(f, mean, dim=0)) for f in flat]
    assert lowrank.alignments(layers, weights) == pytest.approx(expected, abs=1e-9)
    assert lowrank.norm(layers[0][0]) == pytest.approx(float((layers[0][0][0] @ layers[0][0][1]).norm()))


def test_who_goes_the_other_way_is_told_so_and_who_goes_nowhere_scores_0() -> None:
    step = (0.01 * torch.ones(3, 1), torch.ones(1, 2))
    assert lowrank.alignments([[step, (-step[0], step[1])]], [0.7, 0.3]) == pytest.approx([1, -1])
    assert lowrank.norm(step) == pytest.approx(0.01 * 6**0.5)
    assert lowrank.alignments([[step, (0 * step[0], step[1])]], [0.7, 0.3]) == pytest.approx([1, 0])


@pytest.mark.parametrize("dense", [True, False])
def test_alignments_with_an_update_are_over_all_layers_and_0_with_nothing(dense: bool) -> None:
    """Layers W1 = (1, 0), W2 = (0, 2), times 0.01, of norm 0.01 sqrt(5). A site of (3, 0), (0, 0) has cosine 1 / sqrt(5)."""
    unit = torch.eye(2)
    rows = {"one": unit[:1], "two": 2 * unit[1:]}
    updates = {n: Update(torch.full((1, 1), 0.01), row) for n, row in rows.items()}
    if dense:
        updates = {n: as_dense(update.left @ update.right) for n, update in updates.items()}
    sites = {n: [(torch.full((1, 1), by), row) for by in (2.0, -0.001, 0.0)] for n, row in rows.items()}
    sites["one"].append((torch.ones(1, 1), 3 * unit[:1]))
    sites["two"].append((torch.ones(1, 1), 0 * unit[1:]))
    assert lowrank.alignments_with(sites, updates) == pytest.approx([1, -1, 0, 5**-0.5])
    assert lowrank.alignments_with(sites, {n: zero_update(1, 2) for n in rows}) == [0] * 4


def test_the_margin_solves_its_equation() -> None:
    eta = certified._required_margin(4096, 16, 14)
    chebyshev = math.cosh(13 * math.acosh(1 + 2 * eta))
    assert (math.sqrt(8192 / math.pi) / (math.sqrt(eta) * chebyshev)) ** 16 == pytest.approx(1e-12, rel=1e-6, abs=0)
