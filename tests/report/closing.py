"""The closing table as `simulate` prints it, for the tests of tables and of the live view."""

from collections.abc import Mapping, Sequence

from rich.console import Group

from consilium.report.results_table import NO_SCORES, results_table
from consilium.report.run_record import Results
from consilium.report.tables import terminal_table
from consilium.tasks.registry import Scores


def result_table(
    results: Results,
    title: str,
    scores: Scores,
    width: int = 120,
    losses: Mapping[str, float] = NO_SCORES,
    apart: frozenset[str] = frozenset(),
    refused: Sequence[str] = (),
) -> Group:
    """Return the closing table as `simulate` prints it."""
    return terminal_table(results_table(results, scores, title, apart, refused, losses), width, "results.json has them")
