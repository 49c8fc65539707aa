"""Drift against an oracle (FedHera, Eq. 14 and 15), from factors, is that of the dense matrices."""

import pytest
import torch

from consilium.core.linalg.lowrank import Product
from consilium.strategies.heterogeneous_ranks.ranks import oracle_drift


def product(rank: int, seed: int, out: int = 6, into: int = 5) -> Product:
    make = torch.Generator().manual_seed(seed)
    return torch.randn(out, rank, generator=make), torch.randn(rank, into, generator=make)


def test_drift_over_all_layers_equals_the_dense_one() -> None:
    site, oracle = [product(1, 0), product(2, 1)], [product(4, 2), product(5, 3)]
    apart = torch.cat([(b @ a - d @ c).flatten() for (b, a), (d, c) in zip(site, oracle, strict=True)])
    best = torch.cat([(d @ c).flatten() for d, c in oracle])
    absolute, relative = oracle_drift(site, oracle)
    assert absolute == pytest.approx(float(apart.norm()), rel=1e-5)
    assert relative == pytest.approx(float(apart.norm() / best.norm()), rel=1e-5)


def test_no_drift_of_equal_updates_whatever_their_factors() -> None:
    b, a = product(2, 0)
    absolute, relative = oracle_drift([(2 * b, a / 2)], [(b, a)])
    assert absolute == pytest.approx(0, abs=1e-5)
    assert relative == pytest.approx(0, abs=1e-5)


def test_an_oracle_that_did_not_move() -> None:
    still = (torch.zeros(6, 1), torch.zeros(1, 5))
    assert oracle_drift([still], [still]) == (0.0, 0.0)
    assert oracle_drift([product(1, 0)], [still])[1] == float("inf")
