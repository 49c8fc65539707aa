"""The server's checkpoint of a run with many sites."""

from pathlib import Path

import pytest
import torch

from consilium.core import storage
from consilium.federation.job_assembly import assemble_job
from consilium.server import run_start
from consilium.server.run_start import Saved
from consilium.strategies.strategy import ServerState
from tests.conftest import small_config


def test_reading_many_sites_is_exact_and_linear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`site-1` is the beginning of `site-10`, one site has no tensors, and a tensor's name has a slash."""
    scans = []
    monkeypatch.setattr(run_start, "group_of", lambda *given: scans.append(given[1]) or storage.group_of(*given))
    job, numbers = assemble_job(small_config("fedit")), []
    for count in (12, 120):
        sites = {f"site-{i}": {"layer.lora_A": torch.full((2,), float(i)), "a/b": torch.ones(1)} for i in range(count)}
        sites["site-none"] = {}
        ages = {name: number for number, name in enumerate(sites)}
        shared = {"layer.lora_A": torch.zeros(2)}
        state = ServerState(3, 1, shared, shared, sites=sites, reported=ages, weights=dict.fromkeys(sites, 1))
        run_start.write_run_checkpoint(tmp_path, job, Saved("r", "base", state))
        found = run_start.read_run_checkpoint(tmp_path, job).state
        assert (found.round, found.phase, found.reported) == (3, 1, ages)
        assert found.sites.keys() == sites.keys()
        for name, tensors in sites.items():
            assert found.sites[name].keys() == tensors.keys()
            assert all(torch.equal(found.sites[name][one], tensor) for one, tensor in tensors.items())
        numbers.append(len(scans))
    assert numbers[1] == 2 * numbers[0]  # each reading scans the tensors equally often, for ten times as many sites too
