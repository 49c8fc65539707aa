"""Numbers on other CPUs: the numeric tests again at each level of vector units and with other numbers of threads."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
LEVELS = ("default", "avx2", "avx512")
PLAINEST = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}
"""No vector units in PyTorch's own kernels, in oneDNN and in MKL."""
ENGINES = [f"tests/flare/test_{name}.py" for name in ("simulator", "fedhera", "fedsca", "privacy")]
NUMERIC = [
    *(f"tests/{room}" for room in ("adapters", "linalg", "models", "privacy", "strategies", "tasks", "training")),
    *(f"tests/federation/test_{name}.py" for name in ("coordinator", "simulate", "simulate_text", "simulate_unequal", "site")),
    "tests/adversary/data",
]


def test_the_lists_name_tests_that_are_there() -> None:
    assert [path for path in (*ENGINES, *NUMERIC) if not (ROOT / path).exists()] == []


def levels() -> list[str]:
    """Return the levels that this CPU has, the plainest first."""
    most = torch.backends.cpu.get_cpu_capability().lower()
    return list(LEVELS[: LEVELS.index(most) + 1]) if most in LEVELS else ["default"]


def again(tests: list[str], level: str, threads: int) -> None:
    """Run tests in a process of its own at this level and with so many threads. Fails with their output."""
    choice = PLAINEST if level == "default" else {"ATEN_CPU_CAPABILITY": level}
    paths = os.pathsep.join([str(ROOT / "custom"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = os.environ | choice | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": paths}
    env = {name: value for name, value in env.items() if not name.startswith("PYTEST_")}
    code = "import torch; print(torch.backends.cpu.get_cpu_capability())"
    assert subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True).stdout.lower().strip() == level
    options = ["-q", "-x", "-n", "0", "-o", "addopts=", "-p", "no:cacheprovider", "-m", "not slow and not long"]
    done = subprocess.run([sys.executable, "-m", "pytest", *options, *tests], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:]


@pytest.mark.long
def test_engines_agree_without_vector_units() -> None:
    again(ENGINES, "default", 1)


@pytest.mark.long
@pytest.mark.parametrize(("level", "threads"), [*((level, 1) for level in levels()), (levels()[-1], 2), (levels()[-1], 4)])
def test_numbers_hold_at_every_level_and_with_other_threads(level: str, threads: int) -> None:
    again(NUMERIC, level, threads)
