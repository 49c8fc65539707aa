"""A submitter who chooses a run's name to reach what is not his: the ledger, the record, another's run."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from nvflare.apis.fl_context import FLContext
from nvflare.apis.workspace import Workspace

from consilium.config.run_sections import CrossSiteConfig
from consilium.config.site import SiteConfig
from consilium.core.errors import ConfigError
from consilium.federation.job_assembly import Job
from consilium.federation.run_folders import check_run_name, claim_run_folder
from consilium.flare.job import job_context
from consilium.flare.job.simulation_settings import OUTPUT
from consilium.privacy.accounting import Entry
from consilium.privacy.audit_log import AuditLog
from consilium.privacy.ledger import Ledger
from consilium.server.coordinator import Coordinator
from tests.conftest import assembled, small_config

ENTRY = Entry("ward-7", "site", "zero-out", "local", "job", "run-1", 0, 0, 20.0, 1.0, 1, 0.3)
Place = Callable[..., FLContext]


@pytest.fixture
def submitted(tmp_path: Path) -> Place:
    """Return a maker of FLARE's context at one participant, for a job that somebody submitted under an experiment's name."""

    def make(submitter: str, job_id: str = "0123456789ab") -> FLContext:
        workspace = Workspace(str(tmp_path / "kit"))
        meta = Path(workspace.get_job_meta_path(job_id))
        meta.parent.mkdir(parents=True, exist_ok=True)
        meta.write_text(json.dumps({"submitter_name": submitter}))
        fl_ctx = FLContext()
        fl_ctx.get_job_id = lambda: job_id
        fl_ctx.get_engine = lambda: SimpleNamespace(get_workspace=lambda: workspace)
        return fl_ctx

    (tmp_path / "kit" / "local").mkdir(parents=True)
    (tmp_path / "kit" / "startup").mkdir()
    return make


def named(experiment: str | None) -> Job:
    return assembled(small_config("fedit").model_copy(update={"experiment": experiment}))


TAKEN = ["ledger.sqlite", "audit.jsonl", "AUDIT.JSONL", "owner.json", "runs", "Sites", "server"]


@pytest.mark.parametrize(
    ("state", "name"),
    [(True, name) for name in TAKEN]
    + [(False, TAKEN[0])]
    + [pytest.param(False, name, marks=pytest.mark.slow) for name in TAKEN[1:]],
)
def test_a_run_named_like_a_file_of_ours_is_refused_and_the_ledger_goes_on(
    name: str, state: bool, submitted: Place, tmp_path: Path
) -> None:
    site, fl_ctx = SiteConfig(state=tmp_path / "state" if state else None), submitted("eve")
    with pytest.raises(ConfigError, match="is the name of a file or folder of ours"):
        job_context.open_site_folder(fl_ctx, named(name), "site-1", site)
    with pytest.raises(ConfigError, match="is the name of a file or folder of ours"):
        job_context.open_server_folder(fl_ctx, named(name))
    ledger = Ledger(job_context.site_root(fl_ctx, named("study"), "site-1", site) / "ledger.sqlite")
    ledger.charge_once(ENTRY, {})
    assert ledger.entries() == [ENTRY]


@pytest.mark.parametrize("name", ["..", ".", ".hidden", "a/b", "a\\b", "a.", "-a", "", "a" * 65, "a\n", "a\x1b[2J", "ä", "a b"])
def test_a_name_that_is_no_folders_is_refused_in_one_visible_line(name: str) -> None:
    with pytest.raises(ConfigError, match="experiment") as refusal:
        check_run_name(name)
    assert str(refusal.value).isprintable()


@pytest.mark.parametrize("name", ["a", "ward-7", "study_1.2", "quickstart-20261121-120000", "a" * 64])
def test_usual_names_are_taken(name: str) -> None:
    assert check_run_name(name) == name


def test_the_ledger_lies_beside_all_runs_and_in_none(submitted: Place, tmp_path: Path) -> None:
    fl_ctx, site = submitted("eve"), SiteConfig(state=tmp_path / "state")
    ledger = job_context.site_root(fl_ctx, named("study"), "site-1", site) / "ledger.sqlite"
    for job in (named("study"), named("other"), named(None)):
        folder = job_context.open_site_folder(fl_ctx, job, "site-1", site)
        assert folder.parent == ledger.parent / "runs"


@pytest.mark.parametrize("resume", [False, True])
def test_nobody_resumes_or_writes_into_a_run_of_another(resume: bool, submitted: Place, tmp_path: Path) -> None:
    site = SiteConfig(state=tmp_path / "state")
    mine = job_context.open_server_folder(submitted("ann"), named("study"))
    Coordinator(named("study"), mine, lambda event: None).close()
    private = job_context.open_site_folder(submitted("ann"), named("study"), "site-1", site)
    for place, site_name in ((mine, {}), (private, {"site": "site-1"})):
        assert json.loads((place / "owner.json").read_text()) == {"submitter": "ann"} | site_name
    before = {p: p.read_bytes() for p in mine.rglob("*") if p.is_file()}
    with pytest.raises(ConfigError, match="is a run of ann, not of eve"):
        job_context.open_server_folder(submitted("eve", "second"), named("study"), resume)
    with pytest.raises(ConfigError, match="is a run of ann, not of eve"):
        job_context.open_site_folder(submitted("eve", "second"), named("study"), "site-1", site)
    assert {p: p.read_bytes() for p in mine.rglob("*") if p.is_file()} == before
    assert job_context.open_server_folder(submitted("ann", "third"), named("study"), True) == mine
    assert job_context.open_site_folder(submitted("ann", "third"), named("study"), "site-1", site) == private


def test_names_that_differ_in_case_only_are_one_on_some_disks_so_the_second_is_refused(tmp_path: Path) -> None:
    claim_run_folder(tmp_path, "Study", "ann")
    with pytest.raises(ConfigError, match="there is a run 'Study'"):
        claim_run_folder(tmp_path, "study", "ann")


@pytest.mark.parametrize("former", [False, True], ids=["new", "former version"])
def test_two_sites_with_one_state_are_not_one(former: bool, submitted: Place, tmp_path: Path) -> None:
    """The second would go on in the first's folder, and send its update; a former version's is found by who is on record."""
    site = SiteConfig(state=tmp_path / "state")
    first = job_context.open_site_folder(submitted("ann"), named("study"), "site-1", site)
    if former:
        (first / "owner.json").write_text(json.dumps({"submitter": "ann"}))
        AuditLog(first / "run-1.0123" / "audit.jsonl").add({"site": "site-1", "kind": "hello"})
    with pytest.raises(ConfigError, match=r"is the state of site-1, not of site-2, in this run; give each site .* `state`"):
        job_context.open_site_folder(submitted("ann", "second"), named("study"), "site-2", site)
    assert job_context.open_site_folder(submitted("ann", "third"), named("study"), "site-1", site) == first
    crossing = named(None)
    crossing = replace(crossing, config=crossing.config.model_copy(update={"cross_site": CrossSiteConfig(run="study")}))
    assert job_context.former_site_folder(submitted("ann", "fourth"), crossing, "site-1", site) == first
    with pytest.raises(ConfigError, match="is the state of site-1, not of site-2"):
        job_context.former_site_folder(submitted("ann", "fourth"), crossing, "site-2", site)


def test_a_damaged_folder_of_a_former_version_is_named(submitted: Place, tmp_path: Path) -> None:
    site = SiteConfig(state=tmp_path / "state")
    folder = job_context.open_site_folder(submitted("ann"), named("study"), "site-1", site)
    (folder / "owner.json").write_text(json.dumps({"submitter": "ann"}))
    (folder / "run-1.0123").mkdir()
    (folder / "run-1.0123" / "audit.jsonl").write_bytes(b"\xff\n")
    with pytest.raises(ConfigError, match=r"audit\.jsonl: cannot be read, so the run's site is unknown; restore it"):
        job_context.open_site_folder(submitted("ann", "second"), named("study"), "site-1", site)
    (folder / "owner.json").write_text(json.dumps({"submitter": "ann", "site": None}))
    with pytest.raises(ConfigError, match=r"owner\.json: is damaged"):
        job_context.open_site_folder(submitted("ann", "second"), named("study"), "site-1", site)


def test_a_simulation_writes_nothing_into_a_site_s_state(
    submitted: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rehearsals lay beside what counts, and the ledger of the site was theirs."""
    monkeypatch.setenv(OUTPUT, str(tmp_path / "run"))
    site, fl_ctx = SiteConfig(state=tmp_path / "state"), submitted("")
    own = tmp_path / "run" / "sites" / "site-1"
    assert job_context.open_site_folder(fl_ctx, named("study"), "site-1", site) == own
    assert job_context.site_root(fl_ctx, named("study"), "site-1", site) == own
    crossing = named(None)
    crossing = replace(crossing, config=crossing.config.model_copy(update={"cross_site": CrossSiteConfig(run="before")}))
    (tmp_path / "before" / "sites" / "site-1").mkdir(parents=True)
    assert job_context.former_site_folder(fl_ctx, crossing, "site-1", site) == tmp_path / "before" / "sites" / "site-1"
    assert not (tmp_path / "state").exists()


def test_a_run_that_is_not_there_cannot_be_resumed_and_takes_no_name(submitted: Place, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no run 'study' at this server"):
        job_context.open_server_folder(submitted("eve"), named("study"), resume=True)
    assert job_context.open_server_folder(submitted("ann"), named("study")).is_dir()


def test_a_record_of_the_owner_that_is_damaged_lets_nobody_in(tmp_path: Path) -> None:
    (claim_run_folder(tmp_path, "study", "ann") / "owner.json").write_text("{")
    with pytest.raises(ConfigError, match="is damaged; restore it"):
        claim_run_folder(tmp_path, "study", "ann")


def test_a_long_job_name_makes_a_name_that_can_be(submitted: Place) -> None:
    job = assembled(small_config("fedit").model_copy(update={"name": "n" * 200}))
    found = job_context.open_server_folder(submitted("ann"), job)
    assert found.name == "n" * 55 + "-01234567"
