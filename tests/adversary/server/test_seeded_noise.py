"""A server that searches the seeds of a record-level step's noise, or finds a generator of few bits behind a promise."""

import ast
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chi2, kstest
from torch import nn

import consilium
from consilium import __version__
from consilium.config.job import JobConfig
from consilium.core.errors import Reason
from consilium.core.messages import Hello, Payload
from consilium.flare.job import wire
from consilium.privacy.dpsgd import DpSgd, PrivateSteps
from consilium.privacy.guard.release import upload_shapes
from consilium.privacy.ledger import Ledger
from consilium.privacy.plan import not_private_sentence
from consilium.server.coordinator import Coordinator
from tests.adversary.server.conftest import RECORD_LEVEL, SITE_LEVEL, MakeClient
from tests.conftest import assembled, small_config

NUMBERS, UNITS, RATE, CLIP, SIGMA = 64, 8, 0.5, 1.0, 50.0
GUESSES = 2**11


def release(dp: DpSgd, rows: torch.Tensor) -> torch.Tensor:
    """Return the released step of SGD (1.0) from 0, times the divisor: minus the noisy sum of the drawn rows' gradients -x."""
    layer = nn.Linear(rows.shape[1], 1, bias=False)
    nn.init.zeros_(layer.weight)
    with PrivateSteps(layer, torch.optim.SGD(layer.parameters(), 1.0), {"w": layer.weight}, len(rows), dp) as private:
        for part in private.samples(private.draw()):
            with private.sum.add_unit():
                (-layer(rows[part])).mean().backward()
        private.step({})
    return layer.weight.detach().flatten() * len(rows) * dp.sample_rate


def patients() -> torch.Tensor:
    return torch.randn(UNITS, NUMBERS, generator=torch.Generator().manual_seed(1))


# the attack -----------------------------------------------------------------------------------------------------------


def guessed(seed: int) -> torch.Tensor:
    """Return the noise that a seed of torch's gives a step: drawn after a coin for each unit, as Opacus draws."""
    generator = torch.Generator().manual_seed(seed)
    torch.rand(UNITS, generator=generator)
    return torch.normal(0.0, SIGMA * CLIP, (1, NUMBERS), generator=generator).flatten()


def test_a_search_of_what_a_generator_keeps_of_its_seed_takes_no_noise_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: no search that a server can pay for takes the noise off a record-level release.

    torch keeps the low 32 bits of a seed, and a program tries 2^32 in three minutes. For a search of seconds, 21 of those bits
    are told: bytes of the system's generator come as they do, but of the first eight, read as a number, the bits 12 to 32 are
    0. With the right seed the rest is the clipped sum, of norm 8 at most; noise alone has a norm of 400.
    """
    system = os.urandom

    def half_told(count: int) -> bytes:
        drawn = system(count)
        number = int.from_bytes(drawn[:8]) & ~(2**33 - 2**12)
        return number.to_bytes(8)[: len(drawn)] + drawn[8:] if count >= 8 else drawn

    monkeypatch.setattr(os, "urandom", half_told)
    found = release(DpSgd(SIGMA, CLIP, RATE), patients())
    rest = torch.stack([(found + guessed(seed)).norm() for seed in range(GUESSES)])
    assert float(rest.min()) > 10 * UNITS * CLIP


@pytest.mark.slow
def test_every_bit_of_the_systems_randomness_changes_a_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: the noise is a secret of 256 bits. Two keys that differ in one of them give different noise in every number.

    A seed of 32 or 64 bits that is made of the key, in whatever way, would not notice most of the flips.
    """
    key, drawn = bytes(range(32)), []
    for bit in range(-1, 256):
        flipped = (int.from_bytes(key) ^ (1 << bit if bit >= 0 else 0)).to_bytes(32)
        monkeypatch.setattr(os, "urandom", lambda count, flipped=flipped: (flipped * (count // 32 + 1))[:count])
        drawn.append(release(DpSgd(SIGMA, CLIP, RATE), torch.zeros(UNITS, 4)))
    values = torch.stack(drawn)
    assert len({tuple(one.tolist()) for one in drawn}) == 257
    assert bool((values[1:] != values[0]).all())


# the law --------------------------------------------------------------------------------------------------------------


def test_noise_on_a_released_step_has_the_law_of_the_plan() -> None:
    """Of coordinates whose gradient is known to be 0: each number's variance, and sums over all of them.

    Sums over many coordinates are what an attacker uses, and what noise that is not independent fails.
    """
    rows = torch.zeros(UNITS, 400)
    rows[:, 0] = 1.0
    noise = torch.stack([release(DpSgd(SIGMA, CLIP, RATE, seed=seed), rows)[1:] for seed in range(200)]).double()
    units = (noise / (SIGMA * CLIP)).numpy()
    count = units.size
    assert chi2.ppf(1e-4, count) < (units**2).sum() < chi2.ppf(1 - 1e-4, count)
    assert kstest(units.flatten(), "norm").pvalue > 1e-4
    assert kstest(units.sum(1) / np.sqrt(units.shape[1]), "norm").pvalue > 1e-4
    assert kstest(units.sum(0) / np.sqrt(units.shape[0]), "norm").pvalue > 1e-4


# what is behind a promise ---------------------------------------------------------------------------------------------

SOURCE = Path(consilium.__file__).parent
PROMISES = ("privacy", "training", "client", "server")
DRAWS = {"random", "secrets", "numpy.random", "torch.random", "torch.cuda.random"}
"""Modules that draw."""
GENERATORS = {
    "Generator", "RandomState", "SystemRandom", "default_rng", "manual_seed", "urandom", "getrandom", "rand", "randn",
    "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal", "normal_", "uniform_",
    "bernoulli", "bernoulli_", "multinomial", "exponential_", "dropout", "random_", "getrandbits", "uuid4",
    "cauchy_", "log_normal_", "geometric_", "poisson", "standard_normal", "laplace", "gauss", "normalvariate",
}  # fmt: skip
"""Names of functions and classes that draw, in whatever library."""
HARMLESS = {"collections.abc"}
"""Modules whose `Generator` is not a generator of random numbers."""
ALLOWED = {
    ("privacy/randomness.py", "os.urandom"): "the module itself",
    ("privacy/randomness.py", "secrets.randbelow"): "the module itself",
    ("privacy/dpsgd.py", "get_rng_state"): "draws nothing: sees whether a model drew, which is refused",
    ("privacy/dpsgd.py", "rehearse"): "draws nothing: puts the generators back after a step on made-up samples",
    ("training/loop.py", "train"): "torch.manual_seed for models that draw, which DP-SGD refuses; order of batches without DP",
    ("training/loop.py", "_calls"): "the order of batches without DP",
    ("training/gradient_probe.py", "BatchGradients.__init__"): "order of a probe: not with DP-SGD, else under a site's noise",
    ("training/gradient_probe.py", "BatchGradients.__call__"): "draws nothing: puts the generators back after a probe",
    ("training/interpolation.py", "reference_features"): "a personalized model, which never leaves",
    (
        "training/joint_forward.py",
        "check_joint_outputs",
    ): "numbers that a simulation compares two passes by; DP-SGD has no joined pass",
    ("client/data_parallel_worker.py", "_compute_share"): "dropout on several devices, which DP-SGD refuses",
    (
        "client/capacity_probe.py",
        "measure_affordable_ranks",
    ): "draws nothing: puts the generators back after a step on made-up samples",
    (
        "client/site_data.py",
        "limit_training",
    ): "which samples a job leaves out, by its public seed; no cost counts on a secret choice",
    ("server/coordinator.py", "secrets.token_hex"): "the name of a run, from the operating system",
    ("server/coordinator.py", "import random"): "for the two choices of sites below",
    ("server/coordinator.py", "Coordinator.start"): "the sites of a round, by a public seed, which lowers no cost",
    ("server/coordinator.py", "Coordinator.evaluation_payloads"): "the sites that evaluate only, by a public seed",
}
"""Where a generator stands: by file, and function or method (or the one call of it), and why no promise rests on it."""


def draws(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield (function or Class.method, name) of every use of something that draws."""
    imports = [alias for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names = {alias.asname or alias.name: alias.name for alias in imports}
    for where, node in _nodes(tree):
        if isinstance(node, ast.ImportFrom) and node.module in HARMLESS:
            continue
        if isinstance(node, ast.ImportFrom) and (node.module in DRAWS or {a.name for a in node.names} & GENERATORS):
            yield where, f"from {node.module}"
        elif isinstance(node, ast.Import) and {alias.name for alias in node.names} & (DRAWS - {"secrets"}):
            yield where, f"import {node.names[0].name}"
        elif isinstance(node, ast.Attribute):
            owner = _dotted(node.value, names)
            if node.attr in GENERATORS or owner in DRAWS:
                yield where, f"{owner}.{node.attr}".lstrip(".")


def _nodes(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Yield (function or Class.method, node) of a module; "" for what stands in no function or class."""
    for top in tree.body:
        where = getattr(top, "name", "")
        for part in top.body if isinstance(top, ast.ClassDef) else [top]:
            inner = f"{where}.{getattr(part, 'name', '')}".rstrip(".") if isinstance(top, ast.ClassDef) else where
            yield from ((inner, node) for node in ast.walk(part))


def _dotted(value: ast.expr, names: dict[str, str]) -> str:
    """Return the full name of an imported module or of a part of it, as `numpy.random`; "" for anything else."""
    if isinstance(value, ast.Name):
        return names.get(value.id, "")
    owner = _dotted(value.value, names) if isinstance(value, ast.Attribute) else ""
    return f"{owner}.{value.attr}" if owner and isinstance(value, ast.Attribute) else ""


def found_in(code: str) -> list[str]:
    return [name for _, name in draws(ast.parse(code))]


def test_no_generator_but_the_one_module_is_behind_a_promise() -> None:
    """Claim: noise, coins, choices, masks, shares, nonces and keys come from privacy/randomness.py, and from nothing else."""
    wrong = []
    for path in sorted(path for room in PROMISES for path in (SOURCE / room).rglob("*.py")):
        file = path.relative_to(SOURCE).as_posix()
        for where, name in draws(ast.parse(path.read_text(encoding="utf-8"))):
            if (file, where) not in ALLOWED and (file, name) not in ALLOWED:
                wrong.append(f"{file}: {where}: {name}")
    assert wrong == []


def test_the_walk_sees_each_way_to_draw() -> None:
    assert set(found_in("import torch\nx = torch.Generator().manual_seed(3)")) == {"manual_seed", "torch.Generator"}
    assert found_in("import os\nx = os.urandom(8)") == ["os.urandom"]
    assert found_in("import secrets as s\nx = s.token_bytes(8)") == ["secrets.token_bytes"]
    assert found_in("import numpy as np\nx = np.random.default_rng(3)")
    assert found_in("from random import Random\nx = Random(3)")
    assert found_in("import random\nx = random.random()")
    assert found_in("import numpy as np\nx = np.random.random(3)") == ["numpy.random.random"]
    assert found_in("import torch\nwith torch.random.fork_rng():\n    pass") == ["torch.random.fork_rng"]
    assert found_in("x.normal_(0, 1)") == ["normal_"]
    method = ast.parse("class A:\n    def f(self):\n        return os.urandom(8)\n    def g(self):\n        return 3")
    assert [where for where, _ in draws(method)] == ["A.f"]
    assert found_in("import torch\nx = torch.zeros(3)") == []


def test_a_seeded_site_that_leaves_before_a_resume_is_still_named(tmp_path: Path) -> None:
    raw = small_config("fedit", rounds=2).model_dump() | {"privacy": SITE_LEVEL}
    raw["federation"]["min_sites"] = 1
    job = assembled(JobConfig.model_validate(raw))

    def play(sites: dict[str, bool], resume: bool) -> Coordinator:
        server = Coordinator(job, tmp_path, lambda event: None, resume)
        for name, seeded in sites.items():
            server.welcome(Hello(name, 1, False, __version__, seeded=seeded))
        for name in server.start():
            place = server.state.round, server.state.phase
            shapes = upload_shapes(job.strategy, server.sent[name])
            assert server.accept(name, Payload(*place, {n: torch.zeros(shape) for n, shape in shapes.items()})) is None
        server.conclude()
        return server

    play({"site-1": True, "site-2": False}, resume=False).close()
    server = play({"site-2": False}, resume=True)
    server.finish()
    server.close()
    told = not_private_sentence(["site-1"])
    assert told in (tmp_path / "adapters/global/README.md").read_text()
    for folder in (tmp_path, tmp_path / "adapters/global"):
        assert told in json.loads((folder / "privacy.json").read_text())["claim"]


# what has begun already -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_round_that_a_former_version_has_begun_is_not_answered(client: MakeClient, tmp_path: Path) -> None:
    """What was trained with noise that can be taken off must not leave now, in a row that says otherwise."""
    first = client(RECORD_LEVEL)
    assert wire.reason_of(first.ask("train", first.task())) is None
    begun = [replace(row, mechanism="") for row in first.guard.ledger.entries() if row.count]
    shutil.rmtree(tmp_path / "one")
    first.guard.ledger.path.unlink()
    for row in begun:
        Ledger(first.guard.ledger.path).charge_once(row, {})
    again = client(RECORD_LEVEL)
    assert wire.reason_of(again.ask("train", again.task())) is Reason.LEDGER
    assert not again.trainer.did
    assert wire.reason_of(again.ask("train", again.task(round=1))) is None
