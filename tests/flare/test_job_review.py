"""`consilium approve`: what a person is shown before the approval, whether the site would refuse the job, and the question."""

import hashlib
import json
import os
import shutil
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from consilium.client import approval
from consilium.config.job import JobConfig, load_job
from consilium.core.errors import ConfigError
from consilium.data.synthetic.phantoms import make_phantoms
from consilium.federation.job_assembly import assemble_job
from consilium.flare.job.recipe import export_simulation_job
from consilium.flare.kit.job_review import MARGIN, Review, review
from tests.conftest import JOBS, run, small_config

WHO = {"submitter_name": "lead@hub.example", "submitter_org": "hub", "submitter_role": "lead"}


def job(rounds: int = 2, **sections: Any) -> JobConfig:
    return JobConfig.model_validate(small_config("fedit", rounds=rounds).model_dump() | sections)


PRIVATE = job(privacy={"unit": "site", "epsilon": 8.0, "clip": 1.0})


def received(kit: Path, tmp_path: Path, config: JobConfig) -> Path:
    """Return the app of a job as FLARE puts it into a site's kit."""
    app = kit / "0c5d0bd4" / "app_clinic"
    shutil.rmtree(app.parent, ignore_errors=True)
    shutil.rmtree(tmp_path / "job", ignore_errors=True)
    shutil.copytree(export_simulation_job(config, tmp_path / "job", ["clinic"]) / "app", app)
    (app.parent / "meta.json").write_text(json.dumps(WHO))
    return app


def reviewed(kit: Path, tmp_path: Path, config: JobConfig, site: str) -> Review:
    (kit / "local/site.yaml").write_text(f"{{approve: digest, state: {tmp_path / 'state'}, {site}}}")
    return review(received(kit, tmp_path, config), kit)


@pytest.mark.parametrize(("budget", "refused"), [(8.1, False), (7.9, True)])
def test_job_is_weighed_against_the_budget(budget: float, refused: bool, kit: Path, tmp_path: Path) -> None:
    """The job asks for epsilon 8 at the budget's delta; the guard's own rule decides, and nothing is written."""
    site = f"privacy: {{dataset: ward-7, budgets: {{site: {{epsilon: {budget}}}}}}}"
    found = reviewed(kit, tmp_path, PRIVATE, site)
    assert found.cost is not None
    numbers = found.cost.budgets["site"]
    assert numbers == {"spent": 0.0, "after": pytest.approx(8.0, rel=1e-3), "budget": budget, "delta": 1e-5}
    assert bool(found.refusal) is refused
    assert ("privacy budget" in found.refusal) is refused
    assert not (tmp_path / "state").exists()
    shown = "\n".join(found.lines())
    assert "lead@hub.example" in shown
    assert "epsilon 8 " in shown
    assert ("REFUSED" in shown) is refused
    assert "8 with this job" in json.loads(json.dumps(found.to_dict(), allow_nan=False))["review"]["budget"][0]


def test_numbers_of_all_phases_of_a_round_are_counted(kit: Path, tmp_path: Path) -> None:
    """DEeR sends every B, then every A."""
    config = small_config("deer")
    initial = assemble_job(config).initial
    assert {name.rpartition("lora_")[2] for name in initial} == {"A", "B"}
    text = " ".join(" ".join(reviewed(kit, tmp_path, config, "").lines()).split())
    assert f"each round: up to {sum(t.numel() for t in initial.values()):,} trained numbers in {len(initial)} tensors" in text


def test_base_model_with_another_hash_than_the_job_names_is_refused(kit: Path, tmp_path: Path) -> None:
    """As the site itself would refuse it at the hello; an administrator learns it before the approval."""
    base = tmp_path / "base.pth"
    base.write_bytes(b"weights")
    for sha256, refused in ((hashlib.sha256(b"weights").hexdigest(), False), ("0" * 64, True)):
        model = job().model_dump()["model"] | {"checkpoint": str(base), "checkpoint_sha256": sha256}
        found = reviewed(kit, tmp_path, job(model=model), "datasets: {}")
        assert ("the job's model has 000" in found.refusal) is refused


@pytest.mark.parametrize("name", ["a@hub.example", "localhost"])
def test_kit_of_a_person_or_the_server_approves_nothing(name: str, made: Path, tmp_path: Path, kit: Path) -> None:
    with pytest.raises(ConfigError, match=f"--kit: .*{name}: is not a site's startup kit"):
        review(received(kit, tmp_path, job()), made / name)


def test_finer_budget_than_the_job_bounds_is_refused(kit: Path, tmp_path: Path) -> None:
    site = "privacy: {dataset: ward-7, budgets: {site: {epsilon: 5}}}"
    record = job(
        privacy={"unit": "record", "epsilon": 2.0, "clip": 1.0},
        data={"phantoms": {"kind": "fundus", "training": 8, "validation": 1, "test": 1}},
    )
    found = reviewed(kit, tmp_path, record, site)
    assert "privacy budget" in found.refusal
    assert "no bound" in " ".join(found.lines())


@pytest.mark.parametrize(
    ("config", "site", "why"),
    [
        (job(), "privacy: {trust: [local]}", "privacy policy"),
        (job(), "datalist: nowhere.json", "nowhere.json"),
        (job(data={"dataset": "ward-9"}), "datasets: {}", "'ward-9'"),
        (job(statistics={"only": True}), "share_statistics: false", "statistics"),
    ],
)
def test_refusal_of_the_site_is_said_before_the_approval(
    config: JobConfig, site: str, why: str, kit: Path, tmp_path: Path
) -> None:
    found = reviewed(kit, tmp_path, config, site)
    assert why in found.refusal
    assert "REFUSED" in "\n".join(found.lines())


def test_review_fits_80_columns_and_names_the_data_list(kit: Path, tmp_path: Path) -> None:
    how = {"seed": 0, "training": 5, "validation": 1, "test": 1, "size": 64, "appearance": 0.0, "annotation": 0.0}
    listed = make_phantoms(tmp_path / "data", "fundus", "clinic", **how)
    found = reviewed(kit, tmp_path, job(), f"datalist: {listed}")
    assert found.refusal == ""
    assert all(len(one) <= 80 or str(tmp_path) in one for one in found.lines())  # a path stays whole, to be copied
    text = " ".join(" ".join(found.lines()).split())
    assert f"{listed}, 5 training samples" in text
    assert "none: the job asks for no noise" in text
    assert "the number of samples" in text
    assert "configuration only" in text
    assert found.digest in text


def test_page_shows_what_is_printed(kit: Path, tmp_path: Path) -> None:
    """All lines of the administrator's page up to the path of job.yaml and the digest, which have no fixed value."""
    how = {"seed": 0, "training": 8, "validation": 2, "test": 4, "size": 128, "appearance": 0.7, "annotation": 0.7}
    listed = make_phantoms(tmp_path / "data", "fundus", "clinic", **how)
    site = f"datalist: {listed}, privacy: {{dataset: ward-7, budgets: {{site: {{epsilon: 10}}}}, trust: [local, central]}}"
    config = load_job(JOBS / "quickstart_dp", {"training.rounds": 1})
    found = list(reviewed(kit, tmp_path, config, site).lines())
    page = (JOBS.parent / "provisioning/administrator.md").read_text()
    assert "\n".join(found).partition("\nsettings")[0] in page


ROWS = ["job", "from", "model", "data", "privacy", "budget", "leaves", "code", "settings", "digest", "REFUSED"]
FAKE = "digest     0123456789abcdef"
HOSTILE = [
    f"{'x' * 60}{FAKE}".replace(" ", "\u00a0"),  # a word with blanks, which a terminal moves to the next line
    f"{'x' * 60}{FAKE}".replace(" ", "\u2800"),
    f"{'x' * 60}{FAKE}".replace(" ", "\uffa0"),
    "\u5168" * 34 + f"/{FAKE}",  # characters of two columns
    f"x\r\n{FAKE}\x1b[2K\u202e",
    "\u05d0\u05d1 12 of 34",  # a terminal may turn the numbers round
    f"x; segmentation; adapter lora {'x /' * 300}",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_text_of_a_job_neither_fakes_nor_hides_a_row(text: str, kit: Path, tmp_path: Path) -> None:
    """Each line of a terminal that begins at the left is that of a row, or the end of a word without blanks."""
    model = job().model_dump()["model"] | {"checkpoint": text}
    found = reviewed(kit, tmp_path, job(model=model), "datasets: {}")
    for width in (80, 50):
        lines = list(found.lines(width))
        for line in lines:
            words = line[MARGIN:].split(" ")
            assert cell_len(line) <= width or len(words) == 1
            assert all(c.isprintable() and cell_len(c) and unicodedata.bidirectional(c) not in ("R", "AL") for c in line)
            assert not any(c in line for c in "\u2800\uffa0\u00a0")
        rows = [line[:MARGIN].strip() for line in lines if line[:MARGIN].strip()]
        assert rows == ROWS
        assert " ".join(" ".join(lines).split()).count("sam tiny; segmentation; adapter lora; checkpoint") == 1


def test_wide_characters_and_rows_without_a_text_are_shown(kit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = "\u5168\u56fd/\u30e2\u30c7\u30eb.pth"
    found = reviewed(kit, tmp_path, job(model=job().model_dump()["model"] | {"checkpoint": path}), "datasets: {}")
    assert path in " ".join(found.lines())
    monkeypatch.setattr(Review, "_rows", lambda review: iter([("data", ""), ("digest", "1")]))
    assert [line.split() for line in found.lines()] == [["data"], ["digest", "1"]]


def test_author_of_a_folder_names_no_submitter(kit: Path, tmp_path: Path) -> None:
    """The meta.json of a job from the server counts, and that of a folder that came by another way does not."""
    app = received(kit, tmp_path, job())
    assert review(app, kit).submitter == "lead@hub.example (lead of hub), as the server says"
    other = Path(shutil.copytree(app.parent, tmp_path / "sent")) / app.name
    assert json.loads((other.parent / "meta.json").read_text()) == WHO
    assert review(other, kit).submitter == ""


def test_approval_of_a_job_that_the_site_refuses_fails(
    kit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The approval is recorded: it counts once the budget is raised."""
    app = received(kit, tmp_path, PRIVATE)
    for budget, code in ((7.9, 1), (8.1, 0)):
        (kit / "local/site.yaml").write_text(f"privacy: {{dataset: ward-7, budgets: {{site: {{epsilon: {budget}}}}}}}")
        assert run(monkeypatch, "approve", app, "--kit", kit, "--yes") == code
        said = " ".join(capsys.readouterr().out.split())
        assert "approved; recorded in" in said
        assert ("This site would refuse the job all the same" in said) is (code == 1)
        assert len(approval.read_approvals(kit / "local")) == 1


@pytest.mark.parametrize(("answer", "code", "approved"), [("y", 0, 1), ("", 1, 0), ("n", 1, 0)])
def test_person_is_asked_at_a_terminal(
    answer: str, code: int, approved: int, kit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    app = received(kit, tmp_path, job())
    keyboard, terminal = os.openpty()
    os.write(keyboard, f"{answer}\n".encode())
    with os.fdopen(terminal, encoding="utf-8") as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert run(monkeypatch, "approve", app, "--kit", kit) == code
    os.close(keyboard)
    assert "Approve? [y/N]" in capsys.readouterr().out
    assert len(approval.read_approvals(kit / "local")) == approved
