"""Clipping and noise: invariants of the effective update, the law of the noise, rank deficiency, and an attack on the claim."""

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy.stats import beta, kstest

from consilium.core.errors import RefusedError
from consilium.core.messages import Tensors
from consilium.core.norms import norm as joint_norm
from consilium.privacy.accounting import gaussian_delta
from consilium.privacy.discrete_gaussian import Bits, share_deviation
from consilium.privacy.mechanism import Geometry, Outcome, geometry, privatized_coordinates, restore_update, to_real_numbers
from consilium.privacy.randomness import Randomness, secret_bytes
from consilium.privacy.secagg.arithmetic import UNIT

M, R, N = 7, 3, 13
NONE: dict[str, Geometry] = {}
seeded = Randomness.of


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def released_of(
    update: Tensors, maps: dict[str, Geometry], clip: float, std: float, bits: Bits, each: bool = False
) -> tuple[Tensors, Outcome]:
    """Return a release as an update, with noise of a deviation in the update's units, and what was done to it."""
    coordinates, outcome = privatized_coordinates(update, maps, clip, share_deviation(std, 1.0, 1), bits, each)
    assert all(tensor.dtype is torch.int64 for tensor in coordinates.values())
    return restore_update(maps, to_real_numbers(coordinates)), outcome


def no_noise(update: dict, maps: dict, clip: float = 1e6) -> tuple[dict, float]:
    released, outcome = released_of(update, maps, clip, 0.0, seeded(0))
    return released, outcome.norm


@pytest.mark.parametrize(("side", "shape"), [("right", (M, R)), ("left", (R, N))])
def test_the_norm_is_that_of_the_effective_update(side: str, shape: tuple[int, int]) -> None:
    peer, update, scale = draw(R, N) if side == "right" else draw(M, R), draw(*shape, seed=1), 1.7
    product = update @ peer if side == "right" else peer @ update
    released, norm = no_noise({"w": update}, {"w": geometry(peer, side, scale)})
    assert norm == pytest.approx(scale * float(product.norm()), rel=1e-10)
    assert torch.allclose(released["w"], update, atol=1e-10)  # full rank: nothing is lost


@given(st.floats(1e-3, 1e3), st.integers(0, 50))
@settings(max_examples=20, deadline=None)
def test_moving_scale_between_the_factors_changes_nothing(moved: float, seed: int) -> None:
    """PITFALL: clipping in factor space while noising the product."""
    a, update = draw(R, N, seed=seed), draw(M, R, seed=seed + 100)
    _, one = released_of({"w": update}, {"w": geometry(a, "right", 1.0)}, 0.5, 0.3, seeded(seed))
    _, other = released_of({"w": update / moved}, {"w": geometry(a * moved, "right", 1.0)}, 0.5, 0.3, seeded(seed))
    assert other.norm == pytest.approx(one.norm, rel=1e-9)
    assert other.clip_factor == pytest.approx(one.clip_factor, rel=1e-9)
    assert other.noise == pytest.approx(one.noise, rel=1e-9)


def test_clipping_is_joint_over_all_tensors() -> None:
    layers = {str(i): torch.full((1,), 0.6) for i in range(4)}
    released, outcome = released_of(layers, NONE, 0.6, 0.0, seeded(0))
    assert outcome.norm == pytest.approx(1.2)
    assert outcome.clip_factor == pytest.approx(0.5)
    assert joint_norm(released) == pytest.approx(0.6)


def test_each_tensor_is_clipped_on_its_own_where_that_is_asked() -> None:
    """Norms 0.6, 0.2 and 0.3, clip 0.3: the first is halved, the others stay; a tensor of zeros stays one."""
    layers = {name: torch.tensor([value]) for name, value in (("a", 0.6), ("b", 0.2), ("c", -0.3), ("d", 0.0))}
    released, outcome = released_of(layers, NONE, 0.3, 0.0, seeded(0), each=True)
    assert [float(t) for t in released.values()] == pytest.approx([0.3, 0.2, -0.3, 0.0])
    assert (outcome.norm, outcome.signal) == pytest.approx((0.7, 0.22**0.5))


def test_a_small_update_is_not_touched_by_clipping() -> None:
    update = {"w": draw(3, 3)}
    released, outcome = released_of(update, NONE, 1e6, 0.0, seeded(0))
    assert (released["w"] - update["w"]).abs().max() <= UNIT / 2  # rounded to the grid
    assert (outcome.clip_factor, outcome.cosine) == (pytest.approx(1.0), pytest.approx(1.0))


def test_an_update_of_nothing_has_no_cosine_and_no_error() -> None:
    released, outcome = released_of({"w": torch.zeros(2, 2)}, NONE, 1.0, 1.0, seeded(0))
    assert (outcome.norm, outcome.clip_factor, outcome.cosine, outcome.signal) == (0.0, 1.0, 0.0, 0.0)
    assert outcome.noise == pytest.approx(float(released["w"].double().norm()), rel=1e-6)


def test_the_cosine_is_between_the_update_and_what_is_released() -> None:
    update = {"w": draw(4, 4)}
    released, outcome = released_of(update, NONE, 1e6, 0.5, seeded(0))
    cosine = torch.nn.functional.cosine_similarity(update["w"].flatten(), released["w"].double().flatten(), dim=0)
    assert outcome.cosine == pytest.approx(float(cosine), rel=1e-6)
    assert outcome.cosine < 0.99


def test_values_that_are_not_finite_are_refused() -> None:
    with pytest.raises(RefusedError, match="NaN or Inf"):
        released_of({"w": torch.tensor([float("inf")])}, NONE, 1.0, 1.0, seeded(0))


def releases(update: torch.Tensor, map: Geometry, std: float, count: int, bits: Bits) -> list[torch.Tensor]:
    """Return `count` releases of an update, each clipped to 1 on its own and with noise of its own."""
    names = [str(number) for number in range(count)]
    return list(released_of(dict.fromkeys(names, update), dict.fromkeys(names, map), 1.0, std, bits, each=True)[0].values())


def samples(peer: torch.Tensor, side: str, std: float, count: int) -> torch.Tensor:
    """Return effective noise (count, ...) of a release of zeros, as of `count` layers with this peer."""
    zero = torch.zeros((count * M, R) if side == "right" else (R, count * N), dtype=torch.float64)
    noise = released_of({"w": zero}, {"w": geometry(peer, side, 2.0)}, 1.0, std, seeded(3))[0]["w"]
    whole = 2.0 * (noise @ peer if side == "right" else peer @ noise)
    return whole.reshape(count, M, N) if side == "right" else whole.reshape(M, count, N).transpose(0, 1)


def test_phase_a_noise_is_the_mirror_image() -> None:
    b, std = draw(M, R) * torch.tensor([5.0, 1.0, 0.2], dtype=torch.float64), 0.7
    columns = samples(b, "left", std, 3000).permute(0, 2, 1).reshape(-1, M)
    projector = b @ torch.linalg.pinv(b)
    assert (columns.T @ columns / len(columns) - std**2 * projector).abs().max() < 0.06 * std**2


def test_the_law_is_that_of_the_papers_xi_times_the_regulator() -> None:
    """xi A^T (A A^T)^-1 with xi (m, n) against Z (A A^T)^-1/2 with Z (m, r), by covariance and by one-dimensional laws."""
    a = draw(R, N) * torch.tensor([[4.0], [1.0], [0.3]], dtype=torch.float64)
    zero = {"w": torch.zeros(3000 * M, R, dtype=torch.float64)}
    ours = released_of(zero, {"w": geometry(a, "right", 1.0)}, 1.0, 1.0, seeded(5))[0]["w"]
    regulator = a.T @ torch.linalg.inv(a @ a.T)
    paper = draw(len(ours), N, seed=9) @ regulator
    exact = torch.linalg.inv(a @ a.T)
    for found in (ours, paper):
        assert (found.T @ found / len(found) - exact).norm() / exact.norm() < 0.04
    direction = draw(R, seed=11)
    deviation = float((direction @ exact @ direction).sqrt())
    assert kstest((ours @ direction / deviation).numpy(), "norm").pvalue > 1e-3
    assert kstest((paper @ direction / deviation).numpy(), "norm").pvalue > 1e-3


def test_null_directions_carry_neither_update_nor_noise() -> None:
    """PITFALL: pseudo-inverse noise without projecting the update leaks all that lies in the peer's null space."""
    a = torch.zeros(R, N, dtype=torch.float64)
    a[0] = draw(N)
    maps = {"w": geometry(a, "right", 1.0)}
    hidden, seen = torch.zeros(M, R, dtype=torch.float64), torch.zeros(M, R, dtype=torch.float64)
    hidden[:, 1] = 4.4
    seen[:, 0] = 0.1
    one = released_of({"w": seen}, maps, 1.0, 0.5, seeded(1))[0]["w"]
    other = released_of({"w": seen + hidden}, maps, 1.0, 0.5, seeded(1))[0]["w"]
    assert torch.allclose(one, other, atol=1e-10)
    assert one[:, 1:].abs().max() < 1e-12
    assert one[:, 0].abs().min() > 0


def test_a_peer_of_zeros_releases_zeros_of_no_dimension() -> None:
    released, outcome = released_of({"w": draw(M, R)}, {"w": geometry(torch.zeros(R, N), "right", 1.0)}, 1.0, 1.0, secret_bytes)
    assert released["w"].abs().max() == 0
    assert outcome.dimensions == 0


def test_the_product_of_a_large_layer_is_never_formed() -> None:
    size, rank = 8192, 4
    update, maps = {"w": torch.zeros(size, rank)}, {"w": geometry(draw(rank, size), "right", 1.0)}
    coordinates, outcome = privatized_coordinates(update, maps, 1.0, 2**36, seeded(0))
    assert coordinates["w"].shape == (size, rank)
    assert outcome.dimensions == size * rank
    assert maps["w"].forward.shape == (rank, rank)


def lower_epsilon(with_site: torch.Tensor, without: torch.Tensor, delta: float) -> float:
    """Return a 99 % lower bound on epsilon from an attacker's scores: Clopper-Pearson on both error rates, best threshold.

    The threshold is chosen on the first half of the scores and judged on the second, so that choosing it is no cheating.
    """
    half, count = len(with_site) // 2, len(with_site) - len(with_site) // 2

    def bound(positive: int, false: int, total: int) -> float:
        true_rate = float(beta.ppf(0.005, positive, total - positive + 1)) if positive else 0.0
        false_rate = float(beta.ppf(0.995, false + 1, total - false)) if false < total else 1.0
        return math.log(max(true_rate - delta, 1e-12) / false_rate)

    def at(threshold: float, part: slice, total: int) -> float:
        return bound(int((with_site[part] > threshold).sum()), int((without[part] > threshold).sum()), total)

    grid = torch.quantile(torch.cat([with_site[:half], without[:half]]), torch.linspace(0.01, 0.99, 99, dtype=torch.float64))
    best = max(grid.tolist(), key=lambda t: at(t, slice(half), half))
    return at(best, slice(half, None), count)


def scores(update: torch.Tensor, a: torch.Tensor, std: float, count: int, seed: int) -> torch.Tensor:
    """Return the likelihood-ratio scores of `count` releases of an update, seen in the product's space along the true one."""
    suspected = draw(M, R, seed=2) @ a
    suspected = suspected / suspected.norm()
    found = releases(update, geometry(a, "right", 1.0), std, count, seeded(seed))
    return torch.stack([(one @ a * suspected).sum() for one in found])


def test_an_attack_finds_less_than_is_claimed_and_far_more_without_noise() -> None:
    """One release at sigma = 1 against a zeroed-out site. Claimed: the exact epsilon at delta 0.05."""
    a, delta, claimed = 10.0 * draw(R, N), 0.05, 1.5689
    assert gaussian_delta(1.0, claimed) == pytest.approx(delta, rel=2e-3)
    update = draw(M, R, seed=2) * 100  # far over the clip
    found = lower_epsilon(scores(update, a, 1.0, 2000, 1), scores(update * 0, a, 1.0, 2000, 2), delta)
    assert 0.3 < found < claimed  # the attack works, and the claim holds
    silent = lower_epsilon(scores(update, a, 1e-9, 2000, 1), scores(update * 0, a, 1e-9, 2000, 2), delta)
    assert silent > 3 * claimed


def test_noise_is_gaussian_of_the_grids_deviation_and_repeats_with_its_seed_only() -> None:
    zero, sources = {"w": torch.zeros(200, 100)}, (secret_bytes, secret_bytes, seeded(1), seeded(1), seeded(2))
    one, other, first, again, third = (privatized_coordinates(zero, NONE, 1.0, 2**36, bits)[0]["w"] for bits in sources)
    assert not torch.equal(one, other)
    assert torch.equal(first, again)
    assert not torch.equal(first, third)
    assert kstest((one.double() * UNIT).flatten().numpy(), "norm").pvalue > 1e-4


def test_noise_has_covariance_std_squared_on_the_row_space_and_none_off_it() -> None:
    a, std = draw(R, N) * torch.tensor([[10.0], [1.0], [0.1]], dtype=torch.float64), 0.7
    rows = samples(a, "right", std, 4000).reshape(-1, N)
    projector = torch.linalg.pinv(a) @ a
    covariance = rows.T @ rows / len(rows)
    assert (covariance - std**2 * projector).abs().max() < 0.02 * std**2 * 3
    assert (rows - rows @ projector).abs().max() < 1e-9
    assert len(rows) == 28_000


def test_clipping_factors_as_the_paper_prints_breaks_the_bound_and_ours_keeps_it() -> None:
    """With singular values of 10 an update of factor norm C moves the product by 10 C."""
    q = torch.linalg.qr(draw(N, R))[0].T
    a, clip = 10.0 * q, 1.0
    update = draw(M, R, seed=2)
    printed = update * min(1.0, clip / float(update.norm()))
    ours = released_of({"w": update}, {"w": geometry(a, "right", 1.0)}, clip, 0.0, seeded(0))[0]["w"]
    assert float((printed @ a).norm()) == pytest.approx(10.0 * clip)
    assert float((ours @ a).norm()) == pytest.approx(clip)
