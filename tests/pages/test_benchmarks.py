"""The commands of RESULTS.md are there."""

import re
from importlib.util import find_spec
from pathlib import Path

from tests.benchmarks import commands

ROOT = Path(__file__).parents[2]


def test_every_command_of_the_page_is_there() -> None:
    """Modules and studies by their names: a script that is gone is not told to be run."""
    pages = "".join((ROOT / "tests" / name).read_text() for name in ("benchmarks/RESULTS.md", "README.md"))
    modules = set(re.findall(r"python -m ((?:tests|consilium)[\w.]+)", pages))
    studies = set(re.findall(r"study run (\w+)", pages))
    assert len(modules) > 10
    assert [one for one in sorted(modules) if find_spec(one) is None] == []
    assert [one for one in sorted(studies) if not (ROOT / "jobs/studies" / f"{one}.yaml").is_file()] == []


def test_the_commands_that_the_benchmark_leaves_out_and_calls_exist() -> None:
    found = set(commands.names())
    assert found >= commands.LOADS_TORCH
    assert [call for call in commands.CALLS if not {call.split()[0], " ".join(call.split()[:2])} & found] == []
