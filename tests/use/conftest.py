"""One finished run of two sites that all tests of this folder open."""

from pathlib import Path

import pytest

from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.federation.job_assembly import assemble_job
from consilium.report import predictions
from consilium.runtime.engine import simulate
from tests.conftest import small_config

SITES = {"site-1": SiteConfig(), "site-2": SiteConfig()}


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a FedIT run of one round: all is shared, and the site's own model is another."""
    folder = tmp_path_factory.mktemp("use") / "run"
    raw = small_config("fedit", rounds=1, lr=1e-2).model_dump()
    raw["data"]["phantoms"]["test"] = 2  # of one there is no interval
    with pytest.MonkeyPatch.context() as patch:  # small pictures, at which no test here looks
        for name in ("PANEL", "SIDE"):
            patch.setattr(predictions, name, 64)
        patch.setattr(predictions, "FINE", 1)
        simulate(assemble_job(JobConfig.model_validate(raw)), SITES, folder, lambda event: None)
    return folder
