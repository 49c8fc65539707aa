"""`consilium poc` as an operator types it: one command to a real federation on this machine, and nothing left after it."""

import html
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.x509 import load_pem_x509_certificate

from consilium.cli import kit_pages
from consilium.core.errors import Reason
from consilium.flare.admin.kit_metrics import collect_metrics
from consilium.flare.kit import key_lock, processes
from consilium.flare.kit.local_federation import LEAD, LocalFederation
from tests.conftest import run, small_config
from tests.deployment.federation import Federation
from tests.flare.test_metrics import alert_rules, firing

pytestmark = pytest.mark.slow
COMMAND = [sys.executable, "-c", "from consilium.cli.main import main; main()"]
PRIVATE = {"privacy": {"unit": "site", "epsilon": 8, "clip": 0.5}}


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(small_config("fedit", rounds=1, local_steps=1).model_dump()))
    return path


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return Federation.scratch_environment(tmp_path)


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    ends = time.monotonic() + 20  # FLARE's own scripts look every five seconds
    while living(tmp_path) and time.monotonic() < ends:
        time.sleep(0.5)
    assert living(tmp_path) == []


def living(folder: Path) -> list[str]:
    """Return the command lines that name a folder, of processes that have not ended."""
    lines = [" ".join(one.info["cmdline"] or ()) for one in psutil.process_iter(["cmdline"])]
    return [line for line in lines if str(folder / "federation") in line]


def poc(folder: Path, *words: object) -> list[str]:
    return [*COMMAND, "poc", *map(str, words), "--workspace", str(folder / "federation")]


def test_a_job_runs_and_everything_is_stopped(job: Path, tmp_path: Path, environment: dict[str, str]) -> None:
    """A proxy of the network plays no part."""
    words = poc(tmp_path, job, "--sites", "2", "--format", "json")
    behind = environment | {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    done = subprocess.run(words, env=behind, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["results"].keys() >= {"site-1", "site-2"}
    assert "site-1" in done.stderr
    assert "stopped" in done.stderr
    assert subprocess.run(words, env=environment, capture_output=True, timeout=60).returncode == 2  # never over another's kits


def test_too_few_sites_are_refused_before_anything_starts(
    tmp_path: Path, job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """FLARE would wait for the job's sites."""
    assert run(monkeypatch, *poc(tmp_path, job, "--sites", "1", "--set", "federation.min_sites=2")[len(COMMAND) :]) == 2
    told = capsys.readouterr().err
    assert "--sites: 1: federation.min_sites of the job is 2; give --sites 2" in " ".join(told.split())
    assert not (tmp_path / "federation").exists()


@pytest.mark.parametrize(("when", "number"), [("kits of the server", signal.SIGTERM), ("round 1/", signal.SIGINT)])
def test_ctrl_c_stops_all(when: str, number: int, job: Path, tmp_path: Path, environment: dict[str, str]) -> None:
    words = poc(tmp_path, job, "--sites", "2", "--set", "training.rounds=50")
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout
        for line in process.stdout:
            if when in line:
                break
        assert living(tmp_path)
        process.send_signal(number)
        time.sleep(1)
        process.send_signal(number)  # an impatient user
        output = process.stdout.read()
        assert process.wait(60) in (130, -number), output  # the second may come when all is stopped
    assert "interrupted" in output
    assert "Traceback" not in output


def test_what_is_kept_obeys_the_commands_of_the_page_until_it_is_stopped(
    tmp_path: Path, job: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own job fails and says why; the next one runs."""
    words = poc(tmp_path, job, "--sites", "2", "--keep", "--set", "model.checkpoint=/nowhere")
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=400)
    try:
        assert done.returncode == 1, done.stderr
        assert f"2 sites refused: site-1, site-2: {Reason.CHECKPOINT.text}" in done.stderr
        kit = tmp_path / "federation/kits/poc/prod_00/lead@hub.example"
        assert str(kit) in done.stdout
        root = load_pem_x509_certificate((kit / "startup/rootCA.pem").read_bytes())
        assert f"root fingerprint {root.fingerprint(SHA256()).hex()}" in done.stdout
        assert run(monkeypatch, "submit", job, "--kit", kit, "--experiment", "one", "--wait") == 0
        assert run(monkeypatch, "status", "one", "--kit", kit, "--check") == 0
        assert run(monkeypatch, "sites", "--kit", kit) == 0
        assert "site-2" in capsys.readouterr().out
        assert run(monkeypatch, "status", "none", "--kit", kit) == 2
        _all_sites_refuse_a_private_job(job, kit, monkeypatch, capsys)
        _pages_of_running_kits(kit.parent)
    finally:
        assert run(monkeypatch, "poc", "--stop", tmp_path / "federation") == 0
    assert run(monkeypatch, "status", "--kit", kit) == 5
    assert "the firewall" in capsys.readouterr().err


def _all_sites_refuse_a_private_job(
    job: Path, kit: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each place in which an operator may look names the refusals before the number of sites."""
    budget = {"privacy": {"dataset": "ward", "budgets": {"site": {"epsilon": 0.01}}}}
    before = {name: (kit.parent / name / "local/site.yaml").read_text() for name in ("site-1", "site-2")}
    for name in before:
        (kit.parent / name / "local/site.yaml").write_text(yaml.safe_dump(budget))
    private = job.with_name("private.yaml")
    private.write_text(yaml.safe_dump(yaml.safe_load(job.read_text()) | PRIVATE))
    assert run(monkeypatch, "submit", private, "--kit", kit, "--experiment", "refused", "--wait") == 1
    told = {"submit": capsys.readouterr().err}
    for name, words in (("status", ["refused"]), ("list", [])):
        assert run(monkeypatch, "status", *words, "--kit", kit) == 0
        told[name] = capsys.readouterr().out
    server = kit.parent / "localhost"
    (stopped,) = [one for one in collect_metrics(server) if one.name == "run_stopped" and one.labels["run"] == "refused"]
    told |= {"metrics": stopped.labels["cause"], "page": html.unescape(kit_pages.overview(server))}
    told["log"] = (server / "log.txt").read_text() + (server.parents[3] / "server.log").read_text()
    for where, text in told.items():
        cause = f"2 sites refused: site-1, site-2: {Reason.BUDGET.text}. So 0 sites are here"
        assert cause in " ".join(text.split()), where
    assert firing(alert_rules()["RunStopped"], [server], time.time())
    for name, text in before.items():
        (kit.parent / name / "local/site.yaml").write_text(text)


def _pages_of_running_kits(kits: Path) -> None:
    """What `consilium serve` shows while server and sites run."""
    site, server = (kit_pages.overview(kits / name) for name in ("site-1", "localhost"))
    assert "It runs." in site
    assert "runs/one" in site
    assert Reason.CHECKPOINT.text in html.unescape(site)
    assert "It runs." in server
    assert {"site-1", "site-2", "completed"} <= set(re.findall(r">([\w-]+)<", server))
    assert "0 problems" in kit_pages.health_page(kits / "site-1")
    assert "<svg" in kit_pages.run_page(kits / "localhost", "one")


def test_flares_own_poc_takes_our_jobs_after_one_command(
    tmp_path: Path, job: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its kits list none of our classes, and their sites have no settings: `consilium allow` brings both."""
    workspace = tmp_path / "federation"
    env = environment | {"NVFLARE_POC_WORKSPACE": str(workspace)}

    def flare(*words: str) -> None:
        subprocess.run(["nvflare", "poc", *words], env=env, check=True, capture_output=True, timeout=300)

    def end() -> None:
        """Stop it; on a busy machine FLARE's own command gives up early."""
        subprocess.run(["nvflare", "poc", "stop"], env=env, check=False, capture_output=True, timeout=300)
        processes.stop([kit for kit in kits.iterdir() if (kit / "startup").is_dir()])

    flare("prepare", "-n", "2", "--force")
    kits = workspace / "example_project/prod_00"
    try:
        flare("start")
        lead = kits / "lead@nvidia.com"
        assert run(monkeypatch, "submit", job, "--kit", lead, "--experiment", "before", "--wait") == 1
        told = capsys.readouterr().err
        assert "not in allow_list; at each participant stop it, run `consilium allow KIT`" in " ".join(told.split())
        end()
        assert run(monkeypatch, "allow", *sorted(kits.iterdir())) == 0
        flare("start")
        assert run(monkeypatch, "submit", job, "--kit", lead, "--experiment", "after", "--wait") == 0
    finally:
        end()


def test_ctrl_c_ends_a_command_that_waits_for_the_server(tmp_path: Path, environment: dict[str, str]) -> None:
    kit = LocalFederation(tmp_path / "federation", {"site-1": {}}).kit(LEAD)
    words = [*COMMAND, "status", "--kit", str(kit)]
    with subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        assert "Connecting" in process.stderr.readline()
        time.sleep(2)
        process.send_signal(signal.SIGTERM)
        try:
            assert process.wait(30) == 130
        finally:
            process.kill()


def test_start_sh_opens_a_locked_kit_by_its_passphrase_only(tmp_path: Path) -> None:
    with Federation(tmp_path / "federation", {"site-1": {}}) as federation:
        kit, script = federation.kit("site-1"), [str(federation.kit("site-1") / "startup/start.sh")]
        key_lock.lock(kit, "five words by telephone")
        for name, text in (("right", "five words by telephone"), ("wrong", "five words by telegraph")):
            (tmp_path / name).write_text(text + "\n")
        federation.start("server", wait=0)
        for name, says in (("", "nobody to ask"), ("wrong", "wrong passphrase")):
            env = federation.environment() | ({"CONSILIUM_PASSPHRASE_FILE": str(tmp_path / name)} if name else {})
            done = subprocess.run(script, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
            assert (done.returncode, says in done.stderr) == (1, True), done.stderr
        under_systemd = ["/bin/bash", script[0].replace("start.sh", "sub_start.sh"), "--once"]  # asks for no passphrase
        env = federation.environment() | {"CONSILIUM_PASSPHRASE_FILE": str(tmp_path / "right")}
        done = subprocess.run(under_systemd, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
        assert (done.returncode, "client.key" in done.stdout + done.stderr) == (1, True), done.stdout + done.stderr
        with open(federation.folder / "site-1.log", "wb") as log:
            subprocess.run(script, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=True, timeout=120)
        federation.until(lambda: "Successfully registered client" in federation.log("site-1"), 120, "site-1 to be in")
        federation.kill("site-1")
        key_lock.lock(kit)
        assert not (kit / "startup/client.key").exists()
        key_lock.unlock(kit, "five words by telephone")  # what the page says to do by hand
        before = federation.log("site-1").count("Successfully registered client")
        federation.start("site-1", wait=0)
        federation.until(lambda: federation.log("site-1").count("Successfully registered client") > before, 120, "site-1 again")
        federation.kill("site-1")
        key_lock.lock(kit)
