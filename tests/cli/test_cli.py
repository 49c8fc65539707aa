"""The command as a user types it: output, JSON, exit codes, one-line errors."""

import json
import re
from pathlib import Path

import pytest
import yaml
from PIL import Image

from consilium.cli.print_results import privacy_claim_text
from consilium.config.site import load_site
from tests.conftest import JOBS, run, small_cells, small_config


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(small_config(rounds=1).model_dump()))
    return path


def test_simulate_ends_with_a_table_and_refuses_to_overwrite(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    workspace = tmp_path / "run"
    assert run(monkeypatch, "simulate", small, "--sites", "2", "--workspace", workspace) == 0
    shown = capsys.readouterr().out
    assert "round 1/1" in shown
    assert "ETA" in shown
    assert "small: test split" in shown
    assert "mean" in shown
    assert shown.splitlines()[-1].endswith(f"{workspace} (metrics.jsonl, tb_events, sites/*/adapters, predictions.png)")
    with Image.open(workspace / "predictions.png") as joint, Image.open(workspace / "sites/site-2/predictions.png") as own:
        assert joint.width > own.width
    assert run(monkeypatch, "simulate", small, "--workspace", workspace) == 2
    assert "holds a run; give another folder, or --resume" in capsys.readouterr().err.replace("\n", " ")


def test_cost_in_both_formats(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    job = JOBS / "quickstart"
    assert run(monkeypatch, "cost", job, "--format", "json") == 0
    own = json.loads(capsys.readouterr().out)[0]
    assert run(monkeypatch, "cost", job, "--sites", 3, "--samples", 10) == 0
    said = capsys.readouterr().out
    for told in (f"{own['total']:,}", " MiB at 3 sites\n", "  the run at 3 sites: "):
        assert told in said
    assert "masks" not in own
    assert "masks" not in said
    assert run(monkeypatch, "cost", JOBS / "quickstart_secagg") == 0
    assert "* masks without noise hide a site's update within this run; over many runs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("noise", "promise"),
    [
        ((), "masks without noise hide a site's update within this run; over many runs only noise protects (privacy:)"),
        (("--set", "privacy.trust=central"), "over many runs only noise protects"),
        (
            ("--set", "privacy.trust=local"),
            "within this run; over many runs its noise does, as far as the ledger's epsilon says",
        ),
    ],
)
def test_cost_says_what_masks_hide_over_many_runs(
    noise: tuple[str, ...], promise: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    private = ("--set", "privacy={unit: site, noise_multiplier: 1.0, clip: 1.0}") if noise else ()
    assert run(monkeypatch, "cost", JOBS / "quickstart_secagg", *private, *noise, "--format", "json") == 0
    own = json.loads(capsys.readouterr().out)[0]
    assert promise in own["masks"]


def test_line_of_site_yaml_is_printed_for_new_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is printed after `site.yaml:` makes a site.yaml that reads the list, whatever characters the path has."""
    place = tmp_path / "ward: 7 #new"
    made = ["--sites", 1, "--training", 4, "--validation", 1, "--test", 1, "--size", 32]
    sources = [
        ("phantoms", [place, *made], place / "site-1/datalist.json"),
        ("split", [place / "site-1", place / "cut"], place / "cut/datalist.json"),
        (
            "partition",
            [place / "cells/site-1/datalist.json", place / "parts", "--sites", 2],
            place / "parts/site-1/datalist.json",
        ),
    ]
    cells = ["--kind", "cells", "--sites", 1, "--training", 40, "--validation", 5, "--test", 5, "--size", 32]
    assert run(monkeypatch, "data", "phantoms", place / "cells", *cells) == 0
    for command, words, expected in sources:
        capsys.readouterr()
        assert run(monkeypatch, "data", command, *words) == 0
        (told,) = [one for one in capsys.readouterr().out.splitlines() if one.startswith("site.yaml")]
        (tmp_path / "site.yaml").write_text(told.partition(": ")[2].removesuffix("; the other sites likewise"))
        assert load_site(tmp_path / "site.yaml").datalist == expected
        assert expected.is_file()


def test_data_check_exit_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(monkeypatch, "data", "phantoms", tmp_path, "--sites", 1, "--training", 2, "--validation", 1, "--test", 1, "--size", 32)
    datalist = tmp_path / "site-1" / "datalist.json"
    assert run(monkeypatch, "data", "check", datalist, "--job", JOBS / "quickstart") == 0
    assert "no problems" in capsys.readouterr().out
    assert run(monkeypatch, "data", "check", datalist, "--job", JOBS / "nuclei_fedit", "--format", "json") == 1
    assert json.loads(capsys.readouterr().out)["problems"]["undeclared label value"]["count"] == 4


def test_a_partition_is_made_checked_and_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    phantoms = ["--kind", "cells", "--sites", 1, "--training", 20, "--validation", 2, "--test", 4, "--size", 64]
    assert run(monkeypatch, "data", "phantoms", tmp_path / "set", *phantoms) == 0
    words = [tmp_path / "set/site-1/datalist.json", tmp_path / "out", "--sites", 2, "--beta", 0.5]
    capsys.readouterr()
    assert run(monkeypatch, "data", "partition", *words) == 0
    assert "site-2: " in capsys.readouterr().out
    assert (tmp_path / "out/partition.png").stat().st_size > 5000
    job = tmp_path / "job.yaml"
    job.write_text(yaml.safe_dump(small_cells(rounds=1, local_steps=1).model_dump()))
    assert run(monkeypatch, "data", "check", tmp_path / "out/site-1/datalist.json", "--job", job) == 0
    assert "class round: " in capsys.readouterr().out
    options = ["--data", tmp_path / "out", "--workspace", tmp_path / "run"]
    assert run(monkeypatch, "simulate", job, *options) == 0
    assert "Accuracy" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cost", "nowhere"], "nowhere: no job.yaml there"),
        (["simulate", JOBS / "quickstart", "--set", "training.lr"], "is not KEY=VALUE"),
        (["simulate", JOBS / "quickstart", "--data", "nowhere"], "--data: nowhere: no such folder"),
        (["simulate", JOBS / "quickstart", "--resume", "--workspace", "nowhere"], "nowhere holds no run"),
        (["data", "phantoms", "x", "--files", "dicom"], "--files: only volumes are written in several ways; add --kind organ"),
        (["data", "phantoms", "x", "--kind", "lungs"], "--kind: 'lungs' is not one of fundus, nuclei"),
        (["data", "check", "nowhere.json"], "nowhere.json: cannot be read"),
        (
            ["simulate", JOBS / "quickstart", "--engine", "flare", "--set", "strategy={name: centralized}"],
            "pools all sites' data",
        ),
    ],
)
def test_errors_are_one_line_and_exit_code_2(
    words: list, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "consilium.flare.job.simulator.Simulator.run_in_child", lambda _, work, *given: work(*given)
    )  # seconds less
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, *words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_a_private_run_has_a_claim_or_says_where_to_find_it(small: Path, tmp_path: Path) -> None:
    """Of record level only the sites know it; without privacy there is none."""
    assert privacy_claim_text(tmp_path) is None
    raw = yaml.safe_load(small.read_text()) | {"privacy": {"unit": "record", "noise_multiplier": 1}}
    small.write_text(yaml.safe_dump(raw))
    assert privacy_claim_text(tmp_path) == f"record level, each site by its own data: consilium privacy ledger {tmp_path}"
    (tmp_path / "privacy.json").write_text('{"claim": "epsilon 3 at delta 1e-05"}')
    assert privacy_claim_text(tmp_path) == "epsilon 3 at delta 1e-05"


def test_data_check_of_a_folder_of_all_sites_and_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = ["--sites", 2, "--training", 2, "--validation", 1, "--test", 1, "--size", 32]
    run(monkeypatch, "data", "phantoms", tmp_path / "sites", *made)
    one, two = (json.loads((tmp_path / f"sites/site-{n}/datalist.json").read_text()) for n in (1, 2))
    stolen = tmp_path / "sites/site-1" / one["training"][0]["image"]
    (tmp_path / "sites/site-2" / two["test"][0]["image"]).write_bytes(stolen.read_bytes())
    (tmp_path / "sites/site-2" / two["training"][1]["image"]).write_bytes(b"<script>alert(1)</script>")
    odd = tmp_path / "sites/site-2/<img src=x onerror=alert(1)>\u202e.png"
    odd.write_bytes(b"none")
    two["validation"].append({"image": odd.name, "label": two["training"][0]["label"]})
    (tmp_path / "sites/site-2/datalist.json").write_text(json.dumps(two))
    capsys.readouterr()
    words = ["data", "check", tmp_path / "sites", "--job", JOBS / "quickstart", "--report", tmp_path / "out"]
    assert run(monkeypatch, *words) == 1
    shown = capsys.readouterr().out
    assert "1 x duplicate between sites" in shown
    assert "training would stop at these problems: unreadable; fix them first" in shown
    assert "it would leave out 1 of 2 training, 1 of 2 validation samples" in shown
    found = json.loads((tmp_path / "out/check.json").read_text())
    assert found["sites"]["site-1"]["verdict"] == ["no problems, 1 kind of warnings"]  # of small splits
    assert found["sites"]["site-2"]["problems"]["unreadable"]["count"] == 2
    assert len(found["between_sites"]["duplicate between sites"]) == 1
    page = (tmp_path / "out/check.html").read_text()
    assert "<img src=x" not in page
    assert "&lt;img src=x onerror=alert(1)&gt;\\u202e.png" in page
    assert not re.search(r"https?://|<script|<link|url\(", page)
    assert (tmp_path / "out/check.html").stat().st_mode & 0o77 == 0


def test_data_check_and_split_find_a_site_s_own_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "data", "phantoms", tmp_path, "--sites", 1, "--training", 4, "--validation", 1, "--test", 1, "--size", 32)
    site = tmp_path / "site-1"
    (site / "datalist.json").rename(tmp_path / "ours.json")
    text = (tmp_path / "ours.json").read_text().replace('"images/', '"site-1/images/').replace('"masks/', '"site-1/masks/')
    (tmp_path / "ours.json").write_text(text)
    (site / "site.yaml").write_text("datalist: ../ours.json\n")
    capsys.readouterr()
    for source in (site, site / "site.yaml", tmp_path / "ours.json"):
        assert run(monkeypatch, "data", "check", source, "--job", JOBS / "quickstart") == 0
        assert "4 training, 1 validation, 1 test" in capsys.readouterr().out
    assert run(monkeypatch, "data", "split", site, tmp_path / "cut", "--format", "json") == 0
    assert json.loads(capsys.readouterr().out)["groups"] == 6
    assert run(monkeypatch, "data", "check", tmp_path / "cut/datalist.json", "--job", JOBS / "quickstart") == 0
    assert run(monkeypatch, "data", "split", site, tmp_path / "cut") == 2
    (site / "site.yaml").write_text("device: cpu\n")
    assert run(monkeypatch, "data", "check", site) == 2
    assert "names no data list" in capsys.readouterr().err
