"""A submitter wants a job to run at a site that runs approved jobs only, and shows its administrator another one."""

import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from typer.testing import CliRunner

from consilium.cli import site_checks
from consilium.cli.main import app
from consilium.client import approval
from consilium.config.job import load_job
from consilium.config.site import SiteConfig
from consilium.core.errors import ConfigError, Reason, RefusedError
from consilium.flare.admin.submission_folder import prepare, prepare_resume
from consilium.flare.job import job_context, site_jobs, wire
from consilium.flare.job.filters import GuardResultFilter, GuardTaskFilter
from consilium.flare.job.recipe import export
from consilium.flare.kit.heartbeat_client import last_refusal
from tests.conftest import JOBS

SITE = SiteConfig(approve="digest")
QUICKSTART = JOBS / "quickstart"


def check(app: Path, site: SiteConfig, local: Path) -> None:
    approval.check_approved(app, load_job(app / approval.JOB), site, local)


def digest_of(app: Path) -> str:
    return approval.digest(app, load_job(app / approval.JOB))


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """Return local/ of a site's kit that has approved the quickstart."""
    folder = tmp_path / "kit" / "local"
    folder.mkdir(parents=True)
    approval.approve(QUICKSTART / "app", folder)
    return folder


@pytest.fixture
def received(tmp_path: Path) -> Path:
    """Return the quickstart's app as it lies at a site: with FLARE's signatures in every folder."""
    folder = Path(shutil.copytree(QUICKSTART / "app", tmp_path / "app_clinic"))
    for place in (folder, folder / "config"):
        (place / ".__nvfl_sig.json").write_text("{}")
        (place / ".__nvfl_submitter.crt").write_text("somebody")
    return folder


def test_every_way_to_submit_an_approved_job_is_the_same_job(local: Path, received: Path, tmp_path: Path) -> None:
    """The run's name and `resume` do not count, nor how a file is written."""
    apps = [received]
    apps.append(prepare(QUICKSTART, {}, "first", tmp_path) / "app")
    apps.append(prepare(QUICKSTART / "app/config/job.yaml", {}, "second", tmp_path) / "app")
    apps.append(export(QUICKSTART, tmp_path / "export") / "app")
    for one in apps:
        check(one, SITE, local)
    with prepare_resume("first", tmp_path, None, {}) as folder:
        check(folder / "app", SITE, local)


def setting(old: str, new: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "config/job.yaml"
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))

    return edit


def client(edit: Callable[[dict], object]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config/config_fed_client.json"
        values = json.loads(path.read_text())
        edit(values)
        path.write_text(json.dumps(values))

    return change


def added(name: str, text: str = "{}") -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)

    return write


@pytest.mark.parametrize(
    "change",
    [
        setting("seed: 0", "seed: 1"),
        setting("min_sites: 2", "min_sites: 1"),
        lambda folder: (folder / "config/job.yaml").open("a").write("privacy: {unit: site, epsilon: 1, clip: 1.0}\n"),
        client(lambda c: c.pop("task_result_filters")),
        client(lambda c: c["components"].append({"id": "x", "path": "a.B"})),
        client(lambda c: c.update(get_task_timeout=1)),
        added("custom/evil.py", "import os"),
        added("config/comm_config.json"),
        added("config/config_fed_client.conf"),
        added("config/app/config/job.yaml", (QUICKSTART / "app/config/job.yaml").read_text()),
        added("config/more/config_fed_server.json"),
    ],
)
def test_a_job_changed_after_approval_is_refused(change: Callable[[Path], object], local: Path, received: Path) -> None:
    change(received)
    with pytest.raises(RefusedError, match=r"is not approved here .*; review it and run: consilium approve ") as told:
        check(received, SITE, local)
    assert told.value.reason is Reason.APPROVAL
    assert digest_of(received) in str(told.value)
    check(received, SiteConfig(), local)  # a site that does not ask


def test_components_in_another_form_cannot_be_approved(local: Path, received: Path) -> None:
    """FLARE would also read config_fed_client.conf, which may include files that the digest leaves out."""
    (received / "config/config_fed_client.json").rename(received / "config/config_fed_client.conf")
    with pytest.raises(ConfigError, match="a job to approve has its components there") as told:
        check(received, SITE, local)
    assert told.value.reason is Reason.APPROVAL


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": 1}'])
def test_a_damaged_record_approves_nothing(text: str, local: Path, received: Path) -> None:
    (local / approval.FILE).write_text(text)
    with pytest.raises(ConfigError, match="remove it and approve the jobs again"):
        check(received, SITE, local)


def test_a_revoked_job_is_refused(local: Path, received: Path) -> None:
    digest = digest_of(received)
    for start in ("", "0" * 64):
        with pytest.raises(ConfigError, match="begins 0 approved digests"):
            approval.revoke(start, local)
    assert approval.revoke(digest[:12], local) == digest
    with pytest.raises(RefusedError, match=digest):
        check(received, SITE, local)


def test_a_revocation_beside_an_approval_holds(local: Path, received: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An approval that has read the list and not yet written it must not bring the revoked job back."""
    other = JOBS / "quickstart_cells/app"
    digest, has_read, read = digest_of(received), threading.Event(), approval.read_approvals

    def read_slowly(folder: Path) -> dict[str, dict[str, str]]:
        found = read(folder)
        if threading.current_thread() is approving:
            has_read.set()
            time.sleep(0.1)  # a revocation that does not wait is done by then
        return found

    approving = threading.Thread(target=approval.approve, args=(other, local))
    monkeypatch.setattr(approval, "read_approvals", read_slowly)
    approving.start()
    has_read.wait()
    approval.revoke(digest, local)
    approving.join()
    assert list(read(local)) == [digest_of(other)]


def test_an_unapproved_job_is_refused_at_hello_before_data_are_touched(local: Path, received: Path, tmp_path: Path) -> None:
    """No guard is made, no folder, no ledger: the job's configuration is all that was read."""
    setting("seed: 0", "seed: 1")(received)
    (local / "site.yaml").write_text(f"approve: digest\nstate: {tmp_path / 'state'}\n")
    workspace = SimpleNamespace(get_app_dir=lambda job: str(received), get_site_config_dir=lambda: str(local))
    workspace.get_root_dir = lambda: str(local.parent)
    for message in (wire.encode_dict(wire.HELLO, {"run": "r"}), Shareable()):
        guard = patch.object(site_jobs, "build_guard")
        with patch.object(job_context, "workspace", lambda fl_ctx: workspace), guard as made:
            reply = GuardTaskFilter().process(message, FLContext())
            GuardResultFilter().process(reply, FLContext())
        assert wire.reason_of(reply) is Reason.APPROVAL
        made.assert_not_called()
    assert not (tmp_path / "state").exists()
    assert last_refusal(local.parent, tmp_path / "state")["refusal"] == "approval"  # for the doctor and the site's health


def test_what_is_obeyed_is_what_was_shown(local: Path, received: Path) -> None:
    """A second job.yaml, deeper in the folder, is not read in the first one's place."""
    added("config/app/config/job.yaml", "name: other\n")(received)
    workspace = SimpleNamespace(get_app_dir=lambda job: str(received), get_site_config_dir=lambda: str(local))
    with patch.object(job_context, "workspace", lambda fl_ctx: workspace):
        assert job_context.load(FLContext()).config.name == "quickstart"


def run(*words: object) -> tuple[int, str]:
    found = CliRunner().invoke(app, ["approve", *map(str, words)])
    return found.exit_code, found.stdout if found.exit_code == 0 else str(found.exception)


def test_without_a_terminal_nothing_is_approved_unless_it_is_said(tmp_path: Path) -> None:
    (tmp_path / "kit/local").mkdir(parents=True)
    for format in ("txt", "json"):
        code, told = run(QUICKSTART, "--kit", tmp_path / "kit", "--format", format)
        assert code == 1
        assert told.startswith("there is no terminal to ask at, so nothing is approved; ")
        assert not (tmp_path / "kit/local/approved.json").exists()


def test_json_shows_the_review_before_anything_is_approved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program could read the review only by approving the job. At a terminal the message said that there is none."""
    (tmp_path / "kit/local").mkdir(parents=True)
    monkeypatch.setattr(site_checks.sys, "stdin", SimpleNamespace(isatty=lambda: True))
    with pytest.raises(ConfigError, match="--format json asks no question, so nothing is approved; "):
        site_checks.approve(QUICKSTART, kit=tmp_path / "kit", format="json")
    found = json.loads(capsys.readouterr().out)
    assert (found["job"]["name"], found["approved"]) == ("quickstart", None)
    assert len(found["digest"]) == 64
    assert not (tmp_path / "kit/local/approved.json").exists()


def test_only_what_was_shown_is_approved(received: Path, tmp_path: Path) -> None:
    """The job's files change between the review and the answer."""
    local = tmp_path / "kit/local"
    local.mkdir(parents=True)
    shown = digest_of(received)
    setting("seed: 0", "seed: 1")(received)
    with pytest.raises(ConfigError, match="has changed since it was shown"):
        approval.approve(received, local, reviewed=shown)
    assert approval.read_approvals(local) == {}


def test_the_command_shows_what_leaves_and_keeps_a_record(tmp_path: Path) -> None:
    """One factor a layer is shared: of 4 encoder blocks' fused qkv, and of q, k, v, out in the decoder's 7 attentions."""
    kit = tmp_path / "kit"
    (kit / "local").mkdir(parents=True)
    code, shown = run(QUICKSTART, "--kit", kit, "--yes", "--format", "json")
    found = json.loads(shown)
    assert code == 0
    assert found["job"]["name"] == "quickstart"
    assert found["review"]["code"] == ["none: the job is configuration only"]
    assert found["review"]["privacy"] == ["none: the job asks for no noise"]
    assert f"in {4 + 7 * 4} tensors" in found["review"]["leaves"][0]
    (digest,) = json.loads(run("--list", "--kit", kit, "--format", "json")[1])
    assert digest == found["approved"] == digest_of(QUICKSTART / "app")
    assert (kit / "local/approved.json").stat().st_mode & 0o777 == 0o600
    code, text = run(QUICKSTART / "app", "--kit", kit, "--yes")
    assert code == 0
    assert digest in text
    assert str(kit / "local/approved.json") in text.splitlines()[-1]
    assert digest in run("--list", "--kit", kit)[1]
    assert json.loads(run("--revoke", digest[:8], "--kit", kit, "--format", "json")[1]) == {"revoked": digest}
    assert run("--list", "--kit", kit)[1] == "nothing is approved\n"


def test_files_beyond_the_configuration_are_named_without_their_escapes(received: Path, tmp_path: Path) -> None:
    added("config/\x1b[2Jclean.txt")(received)
    (tmp_path / "kit/local").mkdir(parents=True)
    code, shown = run(received, "--kit", tmp_path / "kit", "--yes")
    assert code == 0
    assert "\x1b" not in shown
    assert r"config/\u001b[2Jclean.txt" in shown


def test_wrong_use_is_told(tmp_path: Path) -> None:
    assert run("--kit", tmp_path) == (1, "JOB, --list, --revoke: give exactly one")
    assert run(QUICKSTART, "--list", "--kit", tmp_path) == (1, "JOB, --list, --revoke: give exactly one")
    assert "is not a site's startup kit" in run(QUICKSTART, "--kit", tmp_path / "none")[1]
    for name in ("a", "b"):
        shutil.copytree(QUICKSTART / "app", tmp_path / "job" / name)
    assert "holds 2 apps; give the folder of the one that this site gets" in run(tmp_path / "job", "--kit", tmp_path)[1]


@pytest.mark.parametrize("name", ["config/__pycache__/comm_config.json", "custom/__pycache__/evil.py"])
def test_no_folder_of_an_app_is_left_out_of_the_digest(name: str, received: Path) -> None:
    before = digest_of(received)
    added(name, "{}")(received)
    assert digest_of(received) != before
    assert name in approval.other_files(received)
