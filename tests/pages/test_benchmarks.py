"""The commands of RESULTS.md speak the package's words: their jobs validate, and their tables find the scores of a run."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from consilium.schema import validate
from tests.benchmarks import unequal
from tests.benchmarks.unequal_scores import closing
from tests.conftest import OnlyStrategy

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("method", [*unequal.METHODS, *unequal.VARIANTS])
def test_every_method_for_unequal_sites_is_a_strategy(method: str) -> None:
    options = (unequal.METHODS | unequal.VARIANTS)[method]
    assert validate(OnlyStrategy, {"strategy": options}, Path("job.yaml")).strategy.name == options["name"]


def test_every_command_of_the_page_is_there() -> None:
    """Modules and studies by their names: a script that is gone is not told to be run."""
    pages = "".join((ROOT / "tests" / name).read_text() for name in ("benchmarks/RESULTS.md", "README.md"))
    modules = set(re.findall(r"python -m ((?:tests|consilium)[\w.]+)", pages))
    studies = set(re.findall(r"study run (\w+)", pages))
    assert len(modules) > 10
    assert [one for one in sorted(modules) if find_spec(one) is None] == []
    assert [one for one in sorted(studies) if not (ROOT / "jobs/studies" / f"{one}.yaml").is_file()] == []


def test_closing_losses_are_means_over_records() -> None:
    results = {
        "a": {"validation/pretrained/loss": 4.0, "validation/global/loss": 2.0},
        "b": {"validation/pretrained/loss": 8.0, "validation/global/loss": 1.0},
    }
    assert closing(results, {"a": 3, "b": 1, "c": 5, "d": 0}) == {"pretrained": 5.0, "received": 1.75}
