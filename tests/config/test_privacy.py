"""The `privacy:` sections: what is wrong is said in a line, before anything starts."""

from pathlib import Path

import pytest
import yaml

from consilium.config.job import JobConfig, load_job
from consilium.config.site import load_site
from consilium.core.errors import ConfigError
from consilium.federation.job_assembly import assemble_job
from tests.conftest import JOBS, small_config


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ({"unit": "site", "clip": 1}, "one of epsilon and noise_multiplier; give exactly one"),
        ({"unit": "site", "epsilon": 1, "noise_multiplier": 1, "clip": 1}, "give exactly one"),
        ({"unit": "site", "epsilon": 3, "clip": -1}, "privacy.clip: -1: expected greater than 0"),
        ({"unit": "site", "epsilon": 3}, "privacy.clip: missing; add it"),
        ({"unit": "site", "epsilon": 3, "clip": 1, "delta": 1}, "privacy.delta: 1: expected less than 1"),
        ({"unit": "site", "epsilon": 3, "clip": 1, "trust": "server"}, "privacy.trust: 'server': expected 'local'"),
        ({"unit": "record", "epsilon": 3, "trust": "central"}, "privacy.trust: 'central': expected 'local' or 'distributed'"),
        ({"unit": "record", "epsilon": 3, "divisor": 50}, "divisor: of trust distributed only; remove it"),
        ({"unit": "record", "epsilon": 3, "trust": "distributed", "divisor": 50}, "sample_rate: trust 'distributed' takes one"),
        ({"unit": "record", "epsilon": 3, "per_patient": 2}, "privacy.per_patient: unknown field"),
        ({"unit": "patient", "epsilon": 3, "per_patient": 0}, "privacy.per_patient: 0: expected greater than or equal to 1"),
        ({"unit": "ward", "epsilon": 3}, "privacy.unit: 'ward': expected one of 'site', 'patient', 'record'"),
        ({"epsilon": 3}, "privacy.unit: 'missing': expected one of 'site', 'patient', 'record'"),
        ({"unit": "site", "epsilon": 3, "clip": 1, "trust": "distributed"}, "without secure_aggregation it does; add"),
    ],
)
def test_a_wrong_section_is_named(section: dict, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_job(JOBS / "quickstart", {"privacy": section})
    assert problem in str(caught.value)


def test_site_level_privacy_has_equal_weights_and_no_pooled_data() -> None:
    job, site = JOBS / "quickstart", {"privacy": {"unit": "site", "epsilon": 3, "clip": 1}}
    with pytest.raises(ConfigError, match=r"federation\.weighting: 'samples' with privacy\.unit site would leak data sizes"):
        load_job(job, site | {"federation.min_sites": 1, "federation.weighting": "samples"})
    with pytest.raises(ConfigError, match="privacy: strategy 'centralized'"):
        assemble_job(load_job(job, site | {"strategy": "centralized"}))
    record = {"privacy": {"unit": "record", "epsilon": 3}}
    assert [load_job(job, one).weighting for one in ({}, site, record)] == ["samples", "uniform", "samples"]


def test_a_sites_policy_is_read_and_its_ledger_lies_beside_it(tmp_path: Path) -> None:
    policy = {"dataset": "ward-7", "budgets": {"site": {"epsilon": 3}}, "ledger": "l.sqlite", "trust": ["local", "central"]}
    (tmp_path / "site.yaml").write_text(yaml.safe_dump({"privacy": policy}))
    found = load_site(tmp_path / "site.yaml").privacy
    assert found.ledger == tmp_path / "l.sqlite"
    assert (found.budgets["site"].epsilon, found.budgets["site"].delta) == (3, 1e-5)
    (tmp_path / "site.yaml").write_text(yaml.safe_dump({"privacy": {"budgets": {"sites": {"epsilon": 3}}}}))
    with pytest.raises(ConfigError, match=r"privacy\.budgets\.sites"):
        load_site(tmp_path / "site.yaml")


@pytest.mark.parametrize("unit", ["record", "patient"])
def test_a_choice_by_how_many_there_are_is_none_under_dp_sgd(unit: str) -> None:
    """One record more would change which others are trained on."""
    raw = small_config("fedit").model_dump() | {"privacy": {"unit": unit, "epsilon": 8, "clip": 1.0}}
    JobConfig.model_validate(raw)
    raw["data"] = raw["data"] | {"most_training": 10}
    with pytest.raises(ValueError, match=r"data\.most_training: 10 "):
        JobConfig.model_validate(raw)
