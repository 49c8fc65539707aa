"""A server that is stopped between the noise and the checkpoint, and resumed: by a crash, or by who aborts jobs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from consilium import __version__
from consilium.config.job import JobConfig
from consilium.core.messages import Hello, Payload
from consilium.federation.job_assembly import Job
from consilium.privacy.guard.release import upload_shapes
from consilium.server import run_start
from consilium.server.coordinator import Coordinator
from tests.adversary.server.conftest import SITE_LEVEL
from tests.conftest import assembled, small_config


def begin(job: Job, folder: Path, resume: bool = False) -> Coordinator:
    """Return a coordinator that has all answers of a phase."""
    server = Coordinator(job, folder, lambda event: None, resume)
    for name in ("a", "b"):
        server.welcome(Hello(name, 1, False, __version__))
    for name in server.start():
        shapes = upload_shapes(job.strategy, server.sent[name])
        assert server.accept(name, Payload(0, 0, {n: torch.zeros(shape) for n, shape in shapes.items()})) is None
    return server


def written(folder: Path) -> list[str]:
    """Return what files with many readers hold about the sum of a phase: events of metrics.jsonl, names of TensorBoard."""
    lines = [json.loads(line)["event"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    sizes = [b"update/norm" in path.read_bytes() for path in (folder / "tb_events").rglob("*") if path.is_file()]
    return [event for event in lines if event in ("concluded", "diagnostics", "figure")] + ["norm"] * sum(sizes)


def test_a_sum_whose_noise_is_drawn_anew_leaves_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under trust central sites are charged once, so readers of the run's files may learn of one noisy sum only."""
    raw = small_config("fedit", rounds=1).model_dump() | {"privacy": SITE_LEVEL | {"trust": "central"}}
    raw["federation"]["min_sites"] = 2
    job = assembled(JobConfig.model_validate(raw))
    server = begin(job, tmp_path)

    def stopped(*what: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run_start, "write_run_checkpoint", stopped)
        with pytest.raises(KeyboardInterrupt):
            server.conclude()
    server.close()
    assert written(tmp_path) == []
    again = begin(job, tmp_path, resume=True)
    again.conclude()
    again.close()
    assert written(tmp_path) == ["concluded", "norm"]
