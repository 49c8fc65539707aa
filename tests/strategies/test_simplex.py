"""The projection onto the simplex and SGCA's programme, against an independent solver and by their optimality conditions."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from consilium.strategies.fedsca import mixture_weights, project_to_simplex


def solve(prior: np.ndarray, similarity: np.ndarray, alpha: float) -> np.ndarray:
    """Return one row of SGCA by a general QP solver."""
    import cvxpy  # here: seconds, in every worker otherwise

    w = cvxpy.Variable(len(prior))
    objective = cvxpy.Minimize(cvxpy.sum_squares(w - prior) - alpha * (w @ similarity))
    cvxpy.Problem(objective, [w >= 0, cvxpy.sum(w) == 1]).solve(
        solver=cvxpy.CLARABEL, tol_gap_abs=1e-13, tol_gap_rel=1e-13, tol_feas=1e-13
    )
    return w.value


def case(kind: str, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    prior = torch.rand(count, generator=generator, dtype=torch.float64) + 0.1
    points = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    if kind == "equal":
        points[:] = points[0]
    elif kind == "ties":
        points[count // 2 :] = points[: count - count // 2].clone()
    return prior / prior.sum(), -torch.cdist(points, points)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0, 50.0])
@pytest.mark.parametrize(
    ("kind", "count"), [("random", 6), ("random", 15), ("ties", 7), ("equal", 5), ("random", 1), ("random", 2)]
)
def test_every_row_is_the_solvers(kind: str, count: int, alpha: float) -> None:
    prior, similarity = case(kind, count, seed=count)
    found = mixture_weights(prior, similarity, alpha)
    for i in range(count):
        assert np.abs(found[i].numpy() - solve(prior.numpy(), similarity[i].numpy(), alpha)).max() < 1e-8


@given(st.lists(st.floats(-50, 50), min_size=1, max_size=30))
@settings(max_examples=100, deadline=None)
def test_a_projection_is_feasible_and_optimal(values: list[float]) -> None:
    point = torch.tensor(values, dtype=torch.float64)
    found = project_to_simplex(point)
    assert found.min() >= 0
    assert float(found.sum()) == pytest.approx(1, abs=1e-12)
    slack = point - found  # KKT: equal where positive, not larger anywhere
    level = slack[found > 0]
    assert float(level.max() - level.min()) < 1e-9
    assert float(slack.max()) <= float(level.max()) + 1e-9


def test_what_lies_on_the_simplex_stays() -> None:
    point = torch.tensor([[0.2, 0.3, 0.5], [0.0, 1.0, 0.0]], dtype=torch.float64)
    assert torch.allclose(project_to_simplex(point), point, atol=1e-15)


def test_without_similarity_the_prior_is_the_answer_and_with_much_of_it_the_nearest_site() -> None:
    """PITFALL: m_i taken literally would give 1 / N at alpha = 0."""
    prior, similarity = case("random", 5, 0)
    assert torch.allclose(mixture_weights(prior, similarity, 0.0), prior.expand(5, 5), atol=1e-12)
    assert torch.allclose(mixture_weights(prior, similarity, 1e6), torch.eye(5, dtype=torch.float64), atol=1e-9)
