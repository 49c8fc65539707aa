"""Algorithms whose server keeps more than a mean, over FLARE: equal to the in-process engine, to the bit."""

from pathlib import Path

import pytest
import torch

from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.federation.job import assemble_job
from consilium.runtime.engine import simulate
from tests.conftest import small_config, training_only
from tests.flare.running import MOSTLY_HERE, SITES, Runner, edited, state_of


@MOSTLY_HERE
@pytest.mark.parametrize("name", ["frlora", "fedra"])
def test_flare_ends_where_the_in_process_engine_does(name: str, flare: Runner, tmp_path: Path) -> None:
    raw = training_only(small_config("fedit", local_steps=2, rounds=2)).model_dump() | {"strategy": name}
    config = JobConfig.model_validate(raw)
    workspace = flare(config, edited())
    simulate(assemble_job(config), {one: SiteConfig() for one in SITES}, tmp_path / "inprocess", lambda event: None)
    ours, theirs = (state_of(w / "server/state.safetensors") for w in (workspace, tmp_path / "inprocess"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[n], t) for n, t in theirs.items())
