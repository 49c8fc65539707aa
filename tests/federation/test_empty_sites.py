"""Site-level privacy hides whether a site has data: one without answers as the others do, with noise on zeros."""

import json
from pathlib import Path

import pytest

from consilium.client.build import build_site
from consilium.config.job import JobConfig
from consilium.config.site import CapacityConfig, SiteConfig
from consilium.core.errors import ConsiliumError
from consilium.federation.job_assembly import assemble_job
from consilium.runtime.engine import simulate
from tests.conftest import small_config, training_only
from tests.data.storing import make_site

LENGTHS = {"epochs": {"local_epochs": 1}, "steps": {"local_steps": 1}}
DISTRIBUTED = {"secure_aggregation": {"colluders": 1}, "federation": {"min_sites": 3}}


def job(strategy: str, length: dict[str, int], privacy: dict | None, **more: object) -> JobConfig:
    raw = training_only(small_config(strategy, **length)).model_dump() | {"privacy": privacy} | more
    return JobConfig.model_validate(raw)


def sites(folder: Path, count: int) -> dict[str, SiteConfig]:
    """Return sites of three training samples, the last with none."""
    found = {f"s{i}": make_site(folder / f"s{i}", 3, test=1) for i in range(1, count + 1)}
    last = found[f"s{count}"]
    last.write_text(json.dumps(json.loads(last.read_text()) | {"training": []}))
    return {name: SiteConfig(datalist=path) for name, path in found.items()}


@pytest.mark.parametrize(
    ("strategy", "length", "trust"),
    [
        ("fedit", "steps", "local"),
        ("fediat", "epochs", "local"),
        pytest.param("deer", "epochs", "local", marks=pytest.mark.slow),
        pytest.param("fedala", "steps", "local", marks=pytest.mark.slow),
        pytest.param("feddbe", "steps", "local", marks=pytest.mark.slow),
        pytest.param("fedit", "steps", "distributed", marks=pytest.mark.slow),
    ],
)
def test_a_site_without_samples_releases_noise_every_round(strategy: str, length: str, trust: str, tmp_path: Path) -> None:
    masked = DISTRIBUTED if trust == "distributed" else {}
    privacy = {"unit": "site", "trust": trust, "epsilon": 8, "clip": 0.5}
    assembled = assemble_job(job(strategy, LENGTHS[length], privacy, **masked))
    simulate(assembled, sites(tmp_path, 4 if masked else 2), tmp_path / "run", lambda event: None)
    told = {}
    for record in (tmp_path / "run" / "sites").rglob("audit.jsonl"):
        lines = [json.loads(line) for line in record.read_text().splitlines()]
        told[record.parts[-3]] = [(line["kind"], line.get("tensors", {}).keys()) for line in lines]
    one, *others = told.values()
    assert len(others) == (3 if masked else 1)
    assert any(kind == "update" for kind, _ in one)
    assert all(other == one for other in others)


def test_without_privacy_such_a_site_is_refused_by_name(tmp_path: Path) -> None:
    told: list[str] = []
    assembled = assemble_job(job("fedit", {"local_steps": 1}, None))
    with pytest.raises(ConsiliumError, match="1 site is here"):
        simulate(assembled, sites(tmp_path, 2), tmp_path / "run", lambda event: told.append(str(event)))
    assert any("s2: no training samples" in event for event in told)


@pytest.mark.parametrize("strategy", ["hetlora", "fedhera"])
def test_such_a_site_says_what_it_can_carry_as_the_others_do(strategy: str, tmp_path: Path) -> None:
    """Its `capacity` was empty, which told without noise that it has no data."""
    privacy = {"unit": "site", "trust": "local", "epsilon": 8, "clip": 0.5}
    assembled, told = assemble_job(job(strategy, LENGTHS["steps"], privacy)), []
    for name, site in sites(tmp_path, 2).items():
        limited = site.model_copy(update={"capacity": CapacityConfig(train=4, download=4)})
        told.append(build_site(assembled, name, limited, tmp_path / "run" / name, lambda event: None).hello("r").capacity)
    assert told == [{"download": 4, "time": 4, "memory": 4}] * 2
