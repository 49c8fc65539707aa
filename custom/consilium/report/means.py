"""Cells of the closing table: scores, how many they are taken of, how sure they are, and means over sites."""

from collections.abc import Mapping
from dataclasses import replace
from math import fsum

from consilium.messages import MetricKey
from consilium.tasks.registry import COUNT, HIGH, LOW

Results = Mapping[str, Mapping[str, float]]
"""Metrics of the closing evaluation by site."""
MEAN, BY_N = "mean", "mean by n"
INTERVAL = "_95"
"""Ends the name of a column that shows an interval."""
LEFT_OUT = "intervals and ASSD need a wider terminal; results.json has them"
NOTE = "n: how many a site scored, and its weight in the mean by n; 95 %: bootstrap over patients (volumes, images, records)"


def optional(column: str) -> bool:
    """Tell whether a narrow table does without a column."""
    return column.endswith(INTERVAL) or "/assd" in column


def cell(metrics: Mapping[str, float], column: str) -> str:
    """Return a site's cell."""
    if column.endswith(INTERVAL):
        low, high = (metrics.get(column.removesuffix(INTERVAL) + end) for end in (LOW, HIGH))
        return "-" if low is None or high is None else f"{number(low)}–{number(high)}"
    return _whole(metrics.get(column)) if _is_count(column) else number(metrics.get(column))


def mean_cell(results: Results, column: str, weighted: bool) -> str:
    """Return the cell of a mean over sites; n is the sum, and an interval has no mean."""
    if _is_count(column):
        return _whole(sum(metrics.get(column, 0) for metrics in results.values())) if weighted else ""
    return "" if column.endswith(INTERVAL) else number((weighted_mean_of if weighted else mean_of)(results, column))


def mean_of(results: Results, metric: str) -> float | None:
    """Return the unweighted mean over the sites that report a metric."""
    found = [metrics[metric] for metrics in results.values() if metric in metrics]
    return fsum(found) / len(found) if found else None  # fsum: the order of sites must not show


def weighted_mean_of(results: Results, metric: str) -> float | None:
    """Return the mean over the sites that report a metric, weighted by how many they scored; None where none says that."""
    key = MetricKey.parse(metric)
    count = str(replace(key, metric=COUNT)) if key else ""
    found = [(one[metric], one[count]) for one in results.values() if metric in one and one.get(count, 0) > 0]
    return fsum(value * n for value, n in found) / fsum(n for _, n in found) if found else None


def number(value: float | None) -> str:
    """Return a score as tables show it."""
    return "-" if value is None else f"{value:.3f}" if abs(value) < 1e6 else f"{value:.3g}"


def difference(value: float) -> str:
    """Return a difference of scores as tables show it: with its sign, but where that is of no digit."""
    found = f"{value:+.3f}"
    return found if float(found) else "0.000"


def _whole(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _is_count(column: str) -> bool:
    key = MetricKey.parse(column)
    return key is not None and key.metric == COUNT
