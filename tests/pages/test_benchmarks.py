"""The commands of RESULTS.md speak the package's words: their jobs validate, and their tables find the scores of a run."""

from argparse import Namespace
from pathlib import Path

import pytest

from consilium.federation.build import assemble_job
from consilium.schema import validate
from tests.benchmarks import federate, nuclei, unequal
from tests.benchmarks.unequal_scores import closing
from tests.conftest import OnlyStrategy


@pytest.mark.parametrize("row", [*nuclei.ROWS, *nuclei.BOTTLENECK_ROWS])
def test_every_row_of_the_nuclei_is_a_job(row: str) -> None:
    wanted = (nuclei.ROWS | nuclei.BOTTLENECK_ROWS)[row]
    assert nuclei.config(row, 0, 1, 1, 1e-3).strategy.name == wanted["name"]


@pytest.mark.parametrize("method", [*unequal.METHODS, *unequal.VARIANTS])
def test_every_method_for_unequal_sites_is_a_strategy(method: str) -> None:
    options = (unequal.METHODS | unequal.VARIANTS)[method]
    assert validate(OnlyStrategy, {"strategy": options}, Path("job.yaml")).strategy.name == options["name"]


def test_the_table_of_the_nuclei_has_all_three_models(tmp_path: Path) -> None:
    scores = {"test/pretrained/dice": 0.5, "test/global/dice": 0.25, "test/personalized/dice": 0.75}
    nuclei._write(Namespace(rounds=1, steps=1, lr=1e-3, output=tmp_path / "nuclei.md"), {"fedit": [{"a": scores}]})
    rows = [line for line in (tmp_path / "nuclei.md").read_text().splitlines() if line.startswith(("| fedit", "| base"))]
    assert rows == ["| base (not adapted) | 0.500 | 0.500 |", "| fedit | 0.250 | 0.250 |", "| fedit | 0.750 | 0.750 |"]


@pytest.mark.parametrize("row", federate.ROWS)
def test_every_row_of_why_federate_is_a_job(row: str, tmp_path: Path) -> None:
    for name in ("round", "spiky"):
        (tmp_path / "train" / name).mkdir(parents=True)
    config = federate.config(tmp_path, federate.ROWS[row], 0, 1e-3)
    assert config.training.rounds * config.training.steps_per_round(9) == (720 if "720" in row else 60)
    assemble_job(config)


def test_why_federate_sets_scores_beside_the_pooled_ones() -> None:
    def of(*accuracies: float) -> list[dict[str, float]]:
        return [{"accuracy": one, "f1": one / 2, "up": 2e3, "down": 1e3} for one in accuracies]

    rows = federate.table({"pooled, 60 steps": of(0.4), "pooled, 720 steps": of(0.5), "FedIT": of(0.25, 0.35)})
    assert rows[-1] == "| FedIT | 0.300 ± 0.071 | 0.150 ± 0.035 | 0.75 | 0.60 | 2 | 1 |"


def test_closing_losses_are_means_over_records() -> None:
    results = {
        "a": {"validation/pretrained/loss": 4.0, "validation/global/loss": 2.0},
        "b": {"validation/pretrained/loss": 8.0, "validation/global/loss": 1.0},
    }
    assert closing(results, {"a": 3, "b": 1, "c": 5, "d": 0}) == {"pretrained": 5.0, "received": 1.75}
