"""Numbers on other CPUs: the numeric tests again at each level of vector units and with other numbers of threads.

A level is kept by torch, oneDNN, MKL, numpy, OpenBLAS (numpy's and scipy's) and, at the plainest, the C library.
"""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[1]
LEVELS = ("default", "avx2", "avx512")
LIMITS = {
    "default": {
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA",
    },
    "avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
}
"""At most these vector units in oneDNN and MKL; at the plainest level no fused multiply-add in the C library's exp and log.

Without a limit of oneDNN's, attention in bf16 at torch's level avx2 asks a processor with AMX for AVX-512, and fails.
"""
CORES = {"default": "Prescott", "avx2": "Haswell"}
"""OpenBLAS' kernels, as it is told."""
NAMES = {"default": ("Prescott", "Katmai"), "avx2": ("Haswell",)}
"""As it calls them itself: one kernel serves several cores."""
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


def of_numpy() -> list[str]:
    """Return numpy's names for what this CPU has over its baseline, the plainest first."""
    return list(np.show_config(mode="dicts")["SIMD Extensions"].get("found", []))


def choice(level: str) -> dict[str, str]:
    """Return the environment in which torch, numpy, OpenBLAS and, at the plainest level, all else keep to this level."""
    chosen = {"ATEN_CPU_CAPABILITY": level} | LIMITS.get(level, {})
    if platform.machine() == "x86_64" and level in CORES:
        over = [name for name in of_numpy() if level == "default" or name != "X86_V3"]  # V3 is AVX2's
        chosen |= {"NPY_DISABLE_CPU_FEATURES": " ".join(over), "OPENBLAS_CORETYPE": CORES[level]}
    return chosen


LOOK = """import json, numpy, torch
found = numpy.show_config(mode="dicts")["SIMD Extensions"].get("found", [])
print(json.dumps([torch.backends.cpu.get_cpu_capability().lower(), found]))
"""


def check(level: str, env: dict[str, str]) -> None:
    """Fail unless a process in this environment keeps to the level."""
    done = subprocess.run(
        [sys.executable, "-c", LOOK], env=env | {"OPENBLAS_VERBOSE": "2"}, capture_output=True, text=True, check=True
    )
    torchs, numpys = json.loads(done.stdout.splitlines()[-1])
    assert torchs == level
    if level in CORES and platform.machine() == "x86_64":
        assert [name for name in numpys if level == "default" or name != "X86_V3"] == []
        assert any(f"Core: {name}" in done.stdout + done.stderr for name in NAMES[level])


def again(tests: list[str], level: str, threads: int) -> None:
    """Run tests in a process of its own at this level and with so many threads. Fails with their output."""
    paths = os.pathsep.join([str(ROOT / "custom"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = os.environ | choice(level) | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": paths}
    env = {name: value for name, value in env.items() if not name.startswith("PYTEST_")}
    check(level, env)
    options = ["-q", "-x", "-n", "0", "-o", "addopts=", "-p", "no:cacheprovider", "-m", "not slow and not long"]
    done = subprocess.run([sys.executable, "-m", "pytest", *options, *tests], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:]


@pytest.mark.slow
def test_a_process_keeps_to_the_plainest_level() -> None:
    """The tests below check every level that they use."""
    check("default", os.environ | choice("default"))


@pytest.mark.long
def test_engines_agree_without_vector_units() -> None:
    again(ENGINES, "default", 1)


@pytest.mark.long
@pytest.mark.parametrize(("level", "threads"), [*((level, 1) for level in levels()), (levels()[-1], 2), (levels()[-1], 4)])
def test_numbers_hold_at_every_level_and_with_other_threads(level: str, threads: int) -> None:
    again(NUMERIC, level, threads)
