"""SGCA's quadratic programme in closed form: for every row, min_w sum_j (w_j - m_j)^2 - alpha sum_j w_j d_j on the simplex.

Completing the square, that is the projection of m + (alpha / 2) d onto the simplex, exact by sorting (Held, Wolfe and Crowder
1974): O(N log N) a row, all rows at once.
"""

from consilium.core.lazy import Tensor, torch


def project(rows: Tensor) -> Tensor:
    """Return the Euclidean projection of every row (..., N) onto {w >= 0, sum w = 1}, float64."""
    rows = rows.double()
    ordered = rows.sort(dim=-1, descending=True).values
    size = torch.arange(1, rows.shape[-1] + 1, dtype=torch.float64)
    threshold = (ordered.cumsum(-1) - 1) / size  # what the largest k values must lose for their sum to be 1
    kept = (ordered > threshold).sum(-1, keepdim=True)  # the largest k that leaves all of them positive
    return (rows - threshold.gather(-1, kept - 1)).clamp(min=0)


def mixture_weights(prior: Tensor, similarity: Tensor, alpha: float) -> Tensor:
    """Return the weights (N, N), row i for site i, of `prior` (N,) and `similarity` (N, N): larger is more alike."""
    return project(prior.double() + alpha / 2 * similarity.double())
