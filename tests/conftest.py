"""Shared pieces: one thread or OMP_NUM_THREADS, so that every process sums alike, and a job of a second a round."""

import gc
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import pytest
import torch
from cryptography.hazmat.primitives import serialization
from torch import nn

from consilium.adapters import adapter_state
from consilium.adapters.names import is_base
from consilium.cli.main import main
from consilium.client import site_data
from consilium.config.job import JobConfig
from consilium.core.errors import DataError
from consilium.core.registry import KindField
from consilium.core.schema import Section, validate
from consilium.federation.job_assembly import Job, assemble_job
from consilium.report import figures, predictions, run_files
from consilium.strategies.registry import STRATEGIES
from consilium.strategies.strategy import Strategy

Patch, Capture = pytest.MonkeyPatch, pytest.CaptureFixture[str]
JOBS = Path(__file__).parent.parent / "jobs"

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, as would what they start


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the commands of pages: a file of them takes a third of the slow suite, and nothing is left to do beside it."""
    items.sort(key=lambda item: "pages" not in item.path.parts)


def pytest_collection_finish() -> None:
    """Leave all that is loaded by now to itself: the collector would walk it again and again, half a second each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _equal_environment() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start
    os.environ.pop("CONSILIUM_OUTPUT", None)  # of a simulation that runs these tests
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


@pytest.fixture(autouse=True, scope="session")
def _equal_work_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Draw equal phantoms, check a private key and look a package up once a process: they depend on their arguments alone.

    Files are not flushed to the disk, which matters only in a power cut. No garbage is collected after a message.
    """
    draw, drawn = site_data.make_phantoms, dict[str, Path]()

    def copied(folder: Path, kind: str, *how: Any, **more: Any) -> Path:
        if kind not in ("fundus", "nuclei", "cells") or folder.exists():
            return draw(folder, kind, *how, **more)
        key = repr((kind, how, more))
        if key not in drawn:
            drawn[key] = draw(tmp_path_factory.mktemp("phantoms") / "site", kind, *how, **more)
        shutil.copytree(drawn[key].parent, folder)
        return folder / drawn[key].name

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(site_data, "make_phantoms", copied)
        patch.setattr(serialization, "load_pem_private_key", cache(serialization.load_pem_private_key))
        patch.setattr(os, "fsync", lambda file: None)
        if flare_gc := sys.modules.get("consilium.flare.job.gc"):  # importing it imports FLARE, which many files need not
            patch.setattr(flare_gc, "gc", SimpleNamespace(collect=lambda: None, freeze=lambda: None))
        yield


PICTURES_ASIDE = ("adapters", "adversary", "federation", "plugin", "privacy", "recipes", "strategies", "training")
"""Rooms that look at no picture: their runs draw few and small ones, and no curves or confusion tables: a third less to do."""


@pytest.fixture(autouse=True, scope="module")
def _small_pictures(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if request.path.relative_to(Path(__file__).parent).parts[0] in PICTURES_ASIDE:
            for name in ("PANEL", "SIDE"):
                patch.setattr(predictions, name, 64)
            patch.setattr(predictions, "FINE", 1)
            patch.setattr("consilium.tasks.segmentation.task.EXAMPLES", 2)
            patch.setattr("consilium.tasks.classification.task.EXAMPLES", 2)
            patch.setattr(run_files, "plot_confusions", lambda *_: None)
            if request.path.stem != "test_diagnostics":
                patch.setattr(figures, "plot_curves", lambda *_, **how: None)
        yield


class OnlyStrategy(Section):
    """A job.yaml of a strategy alone."""

    strategy: Annotated[Any, KindField(STRATEGIES, "name")]


def strategy_of(options: dict[str, Any]) -> Strategy:
    """Return the strategy that a job's `strategy:` section describes. Raises ConfigError."""
    return validate(OnlyStrategy, {"strategy": options}, Path("job.yaml")).strategy


def initial(model: nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """Return the first values of a model's adapter."""
    live = {n: t for n, t in adapter_state.tensors(model).items() if not is_base(n)}
    return {name: adapter_state.initial_tensor(name, tuple(tensor.shape), seed) for name, tensor in live.items()}


def run(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    """Run the command and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["consilium", *map(str, words)])
    with pytest.raises(SystemExit) as stopped:
        main()
    return int(stopped.value.code or 0)


def refused(words: str, call: Callable[..., object], *given: Any, error: type[Exception] = DataError, **more: Any) -> str:
    """Make a call that must end in an error of one line with these words (a pattern), and return the line."""
    with pytest.raises(error, match=words) as found:
        call(*given, **more)
    assert "\n" not in str(found.value)
    return str(found.value)


class Snapshot:
    """An observer that copies a run's folder at an event, before anything more is written: what a sudden end would leave."""

    def __init__(self, folder: Path, when: Callable[[Mapping[str, Any]], bool]) -> None:
        self.folder, self.when, self.kept = folder, when, folder.with_name(f"{folder.name}-broken")

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Copy the folder the first time that `when` holds."""
        if not self.kept.exists() and self.when(event):
            shutil.copytree(self.folder, self.kept)

    def restore(self) -> Path:
        """Put the copy in the finished run's place, to be resumed there; return where the finished run is now."""
        whole = self.folder.rename(self.folder.with_name(f"{self.folder.name}-whole"))
        self.kept.rename(self.folder)
        return whole


def small_config(strategy: str | dict[str, Any] = "fediat", **training: Any) -> JobConfig:
    """Return a job of seconds: tiny SAM at 64 pixels, four training phantoms a site, one each to validate and test on."""
    phantoms = {"kind": "fundus", "training": 4, "validation": 1, "test": 1}
    name = strategy if isinstance(strategy, str) else strategy["name"]
    adapter: dict[str, Any] = {"kind": "bottleneck", "width": 4} if name == "fedsca" else {"rank": 4, "alpha": 4}
    if STRATEGIES[name]().traits.ranks_differ:
        adapter = {"kind": "dual_rank", "rank": 8, "scaling": 1.0}
    return JobConfig.model_validate(
        {
            "name": "small",
            "strategy": strategy,
            "model": {"name": "sam", "variant": "tiny", "image_size": 64},
            "adapter": adapter,
            "task": {"classes": {"disc": [1, 2], "cup": [2]}},
            "data": {"phantoms": phantoms},
            "training": {"rounds": 2, "batch_size": 2, "lr": 3e-3, "seed": 0} | training,
            "federation": {"min_sites": 2, "round_timeout": 120, "straggler_grace_seconds": 90},
        }
    )


def small_cells(strategy: str | dict[str, Any] = "fedit", **training: Any) -> JobConfig:
    """Return a classification job of seconds: tiny CLIP at 64 pixels, five kinds of cells."""
    raw = small_config(strategy, **training).model_dump()
    raw["model"] = {"name": "clip", "variant": "tiny", "image_size": 64}
    raw["task"] = {"name": "classification", "classes": ["round", "elongated", "target", "teardrop", "spiky"]}
    raw["data"] = {
        "phantoms": {"kind": "cells", "training": 24, "validation": 5, "test": 10, "appearance": 0.3, "annotation": 0.2}
    }
    return JobConfig.model_validate(raw)


def small_text(strategy: str | dict[str, Any] = "fedit", **training: Any) -> JobConfig:
    """Return a language job of seconds: the tiny LM on sentences of three wards."""
    raw = small_config(strategy, **training).model_dump()
    raw["model"] = {"name": "causal_lm", "variant": "tiny", "max_length": 128}
    raw["task"] = {"name": "language", "evaluate": "label", "labels": ["urgent", "soon", "later"], "max_new_tokens": 8}
    raw["data"] = {"phantoms": {"kind": "sentences", "training": 32, "validation": 3, "test": 6}}
    return JobConfig.model_validate(raw)


def training_only(config: JobConfig, test: int = 0) -> JobConfig:
    """Return a small job without validation and with so much to test on: evaluation is more than half of what one costs."""
    raw = config.model_dump()
    raw["data"]["phantoms"] |= {"validation": 0, "test": test}
    return JobConfig.model_validate(raw)


@pytest.fixture
def small_job() -> Callable[..., Job]:
    """Return a maker of small jobs: small_job("fedit", rounds=1)."""
    return lambda strategy="fediat", **training: assembled(small_config(strategy, **training))


_assembled: dict[str, Job] = {}


def assembled(config: JobConfig) -> Job:
    """Return a job of this package's kinds, with tensors of its own; equal ones are laid out once a process."""
    key = config.model_dump_json()
    if key not in _assembled:
        _assembled[key] = assemble_job(config)
    return Job(config, {name: tensor.clone() for name, tensor in _assembled[key].initial.items()})
