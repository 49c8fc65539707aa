"""SGCA's quadratic programme in closed form: for every row, min_w sum_j (w_j - m_j)^2 - alpha sum_j w_j d_j on the simplex.

By completing the square, the solution is the projection of m + (alpha / 2) d onto the simplex. The projection is exact, by
sorting (Held, Wolfe and Crowder 1974). It takes O(N log N) per row and handles all rows at once.
"""

from consilium.core.lazy import Tensor, torch


def project(rows: Tensor) -> Tensor:
    """Return the Euclidean projection of every row (..., N) onto {w >= 0, sum w = 1}, float64."""
    rows = rows.double()
    ordered = rows.sort(dim=-1, descending=True).values
    size = torch.arange(1, rows.shape[-1] + 1, dtype=torch.float64)
    threshold = (ordered.cumsum(-1) - 1) / size  # subtracted from the largest k values, it makes their sum 1
    kept = (ordered > threshold).sum(-1, keepdim=True)  # the largest k that keeps all of them positive
    return (rows - threshold.gather(-1, kept - 1)).clamp(min=0)


def mixture_weights(prior: Tensor, similarity: Tensor, alpha: float) -> Tensor:
    """Return the mixture weights (N, N), row i for site i, from `prior` m (N,) and `similarity` d (N, N; larger is closer)."""
    return project(prior.double() + alpha / 2 * similarity.double())
