"""FedSCA over FLARE: a payload of its own for every site, low adapters only, equal to the in-process engine."""

from pathlib import Path

import torch

from consilium.config.site import SiteConfig
from consilium.core.messages import SiteInfo
from consilium.federation.job_assembly import assemble_job
from consilium.runtime.engine import simulate
from consilium.strategies.fedsca import MATRIX
from consilium.strategies.strategy import Role
from tests.conftest import small_config, training_only
from tests.flare.running import MOSTLY_HERE, SITES, Runner, check_equal, edited, listen, tensor_names


@MOSTLY_HERE  # test_fedhera.py shows payloads that differ, test_simulator.py what is not on the wire
def test_sites_get_own_mixtures_and_send_low_adapters(flare: Runner, tmp_path: Path) -> None:
    config = training_only(small_config({"name": "fedsca", "low": 2, "alpha": 3.0}, local_steps=2, rounds=2))
    job, workspace = assemble_job(config), flare(config, edited(client=listen))
    reference = simulate(job, {name: SiteConfig() for name in SITES}, tmp_path / "inprocess", lambda event: None)
    ours = check_equal(workspace, tmp_path / "inprocess")

    low = job.strategy.names(job.initial, Role.SHARED, 1, 0)
    others = [name for name in job.initial if name not in low]
    mixtures = {n: job.strategy.payload(reference.state, SiteInfo(n, 1, joined=True)).tensors for n in SITES}
    assert not torch.equal(mixtures["site-1"][low[0]], mixtures["site-2"][low[0]])
    for name in SITES:
        tasks = [p.read_bytes() for p in sorted((workspace / "received" / name).iterdir(), key=lambda p: int(p.stem))]
        last = tasks[-1]  # the final evaluation: the final state's mixtures
        assert all(mixtures[name][n].numpy().tobytes() in last for n in low)
        assert not any(mixtures[other][n].numpy().tobytes() in last for other in SITES if other != name for n in low)
        assert not any(n.encode() in last for n in others)
        assert tensor_names(workspace / "heard" / name) == set(low)
    assert ours[f"matrices/{MATRIX}"].shape == (3, 3)
    assert (workspace / f"{MATRIX}.png").is_file()
