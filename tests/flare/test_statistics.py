"""Statistics over FLARE: the same as in one process, whoever refuses, and no number of a small cell on the wire."""

import json
from pathlib import Path

import pytest
import yaml

from consilium.config.job import JobConfig
from consilium.config.site import Given, find_site
from consilium.core.errors import Reason, RefusedError
from consilium.data.synthetic.phantoms import make_phantoms
from consilium.federation.job_assembly import assemble_job
from consilium.runtime.engine import simulate
from tests.conftest import small_config
from tests.flare.running import LONG, SLOW, Runner, edited, listen

SITES = ["labels", "lacks", "open", "patients", "refuses", "several"]


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sites with own labels, without the data set, as it should be, with known patients, who refuse, with two lists."""
    folder = tmp_path_factory.mktemp("hospitals")
    for name in SITES:
        path = make_phantoms(folder / name, "fundus", name, 0, 12, 1, 11, 64, 0.7, 0.7)
        site: dict = {"datasets": {"eyes": {"datalist": "datalist.json"}}}
        if name == "labels":
            site["datasets"]["eyes"]["labels"] = {1: "disc", 2: ["disc", "cup", "lesion"]}
        if name == "lacks":
            site = {"datalist": "datalist.json"}
        if name == "patients":
            listed = json.loads(path.read_text())
            listed["training"] = [one | {"patient": f"Smith-{i // 4}"} for i, one in enumerate(listed["training"])]
            path.write_text(json.dumps(listed))
        if name == "refuses":
            site["share_statistics"] = False
        if name == "several":
            make_phantoms(folder / name / "other", "fundus", "other", 0, 8, 1, 1, 64, 0.7, 0.7)
            site["datasets"]["other"] = {"datalist": "other/datalist.json"}
        (folder / name / "site.yaml").write_text(yaml.safe_dump(site))
    return folder


def config(only: bool) -> JobConfig:
    raw = small_config("fedit", rounds=1, local_steps=1).model_dump()
    more = {"data": {"dataset": "eyes"}, "statistics": {"minimum": 10, "bins": 8, "only": only}}
    return JobConfig.model_validate(raw | more)


@pytest.mark.parametrize(
    ("only", "flare"),
    [
        (True, "one-process"),
        pytest.param(False, "one-process", marks=LONG),
        pytest.param(False, "simulator", marks=SLOW),
        pytest.param(True, "simulator", marks=LONG),
    ],
    indirect=["flare"],
)
def test_statistics_equal_in_process(only: bool, flare: Runner, hospitals: Path, tmp_path: Path) -> None:
    workspace = flare(config(only), edited(client=listen), SITES, hospitals)
    reference = tmp_path / "inprocess"
    sites = {name: find_site(name, Given(hospitals)) for name in SITES}
    with pytest.raises(RefusedError, match=r"lacks: .*'eyes'"):
        simulate(assemble_job(config(only)), sites, tmp_path / "none", lambda event: None)
    del sites["lacks"]  # which one process takes for a mistake of its user
    simulate(assemble_job(config(only)), sites, reference, lambda event: None)
    told, expected = (json.loads((w / "statistics.json").read_text())["sites"] for w in (workspace, reference))
    assert {name: told[name] for name in sites} == expected
    assert max(map(len, (workspace / "statistics.txt").read_text().splitlines())) <= 80
    assert told["refuses"] == {"refused": Reason.STATISTICS.text}
    assert told["lacks"] == {"refused": Reason.DATASET.text}
    for name in ("labels", "open", "several"):
        training, validation, test = told[name]["splits"].values()
        assert (training["samples"], validation, test["samples"]) == (12, None, 11)
    assert told["patients"]["splits"]["training"] is None  # twelve samples of three patients
    trained = {name for name, scores in json.loads((workspace / "results.json").read_text()).items() if scores}
    assert trained == (set() if only else set(SITES) - {"lacks"})
    assert (workspace / "adapters/global").exists() is not only
    _check_records(workspace)


def _check_records(workspace: Path) -> None:
    """What left is on record, and nothing else did: no patient, no file, no count of a refusing site."""
    for name in SITES:
        sent = b"".join(path.read_bytes() for path in (workspace / "heard" / name).iterdir())
        assert not any(word in sent for word in (b"Smith", b"datalist", b"image-", str(workspace).encode()))
        lines = [json.loads(x) for p in (workspace / "sites" / name).rglob("audit.jsonl") for x in p.read_text().splitlines()]
        assert any(line["kind"] == "statistics" for line in lines) == (name not in ("refuses", "lacks"))
    assert "Smith" not in (workspace / "metrics.jsonl").read_text()


def test_a_resumed_run_keeps_its_statistics(tmp_path: Path, hospitals: Path) -> None:
    sites = {name: find_site(name, Given(hospitals)) for name in ("open", "several")}
    simulate(assemble_job(config(True)), sites, tmp_path / "run", lambda event: None)
    before = (tmp_path / "run" / "statistics.json").stat().st_mtime_ns
    simulate(assemble_job(config(True)), sites, tmp_path / "run", lambda event: None, resume=True)
    assert (tmp_path / "run" / "statistics.json").stat().st_mtime_ns == before
