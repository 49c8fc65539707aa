"""A certified submitter whose job carries configuration only tries to run a program at the sites and at the server."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from consilium.cli.main import app
from consilium.config.job import JobConfig
from tests.conftest import small_config
from tests.deployment.federation import LEAD, Federation

CLIENT, SERVER = "config_fed_client.json", "config_fed_server.json"
NAMED = ("consilium.flare.kit.provision.prepare_builders", "consilium.cli.main.app", "consilium.adapters.bottleneck.save_file")
pytestmark = pytest.mark.slow


def config() -> JobConfig:
    """Return a job of one step that one site is enough for."""
    raw = small_config("fedit", rounds=1, local_steps=1).model_dump()
    return JobConfig.model_validate(raw | {"federation": raw["federation"] | {"min_sites": 1}})


def shell(proof: Path) -> dict[str, Any]:
    """The component of the first finding: FLARE's provisioning, re-exported by ours, builds whatever it is told to."""
    popen = {"config_type": "dict", "path": "subprocess.Popen", "args": {"args": ["touch", str(proof)]}}
    project = {"project_dict": {"builders": [popen]}}
    return {"id": "x", "path": "consilium.flare.kit.provision.prepare_builders", "args": project}


def command(proof: Path) -> dict[str, Any]:
    """Our own command line as a component."""
    words = ["data", "phantoms", str(proof), "--sites", "1", "--training", "1"]
    return {"id": "x", "path": "consilium.cli.main.app", "args": {"args": words, "standalone_mode": False}}


def overwrite(proof: Path) -> dict[str, Any]:
    """A function that one of our modules has imported: it writes any file."""
    return {"id": "x", "path": "consilium.adapters.bottleneck.save_file", "args": {"tensors": {}, "filename": str(proof)}}


Edit = Callable[[dict[str, Any], Path], None]


def executor(client: dict[str, Any], proof: Path) -> None:
    client["executors"].append({"tasks": ["more"], "executor": shell(proof)})


def argument(one: dict[str, Any], name: str, proof: Path) -> None:
    one["args"] = {name: shell(proof)}


ATTACKS: dict[str, tuple[str, Edit]] = {
    "shell at the sites": (CLIENT, lambda c, proof: c["components"].append(shell(proof))),
    "our command line": (CLIENT, lambda c, proof: c["components"].append(command(proof))),
    "any file overwritten": (CLIENT, lambda c, proof: c["components"].append(overwrite(proof))),
    "shell at the server": (SERVER, lambda c, proof: c["components"].append(shell(proof))),
    "as executor": (CLIENT, executor),
    "as filter": (CLIENT, lambda c, proof: c["task_result_filters"][0]["filters"].append(shell(proof))),
    "as workflow": (SERVER, lambda c, proof: c["workflows"].append(shell(proof))),
    "as argument at the sites": (CLIENT, lambda c, proof: argument(c["executors"][0]["executor"], "site", proof)),
    "as argument at the server": (SERVER, lambda c, proof: argument(c["workflows"][0], "resume", proof)),
}


def attack(federation: Federation, name: str, proof: Path) -> Path:
    """Return a job folder with one attack in it."""
    file, edit = ATTACKS[name]
    job = federation.export(config())
    path = job / "app/config" / file
    values = json.loads(path.read_text())
    edit(values, proof)
    path.write_text(json.dumps(values))
    return job


def drivers(federation: Federation, proof: Path) -> Path:
    """Return a job whose config folder has FLARE's own comm_config.json, which names a folder of transports, and one there.

    FLARE reads the first file of that name that it finds anywhere under the kit.
    """
    job = federation.export(config())
    (job / "app/config/transport.py").write_text(f"open({str(proof)!r}, 'w').close()\n")
    kits = [str(federation.kit(name)) for name in ("server", *federation.sites)]
    (job / "app/config/comm_config.json").write_text(json.dumps({"comm_driver_path": ":".join([".", "..", *kits])}))
    return job


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """Two sites; the second runs approved jobs only."""
    with Federation(tmp_path_factory.mktemp("federation"), {"site-1": {}, "site-2": {"approve": "digest"}}) as found:
        found.start()
        yield found
        found.shutdown()


@pytest.mark.parametrize("name", ATTACKS)
def test_a_component_that_is_no_class_of_the_role_is_refused(name: str, federation: Federation, tmp_path: Path) -> None:
    """Nothing it names is called, at any site or at the server, and the job ends with the reason in a log."""
    proof = tmp_path / "proof"
    said = federation.log("server") + federation.log("site-1")
    ended = federation.wait(federation.submit(attack(federation, name, proof), LEAD))
    assert not proof.exists()
    assert ended.startswith("FINISHED:")
    assert ended != "FINISHED:COMPLETED"
    who = "server" if ATTACKS[name][0] == SERVER else "site-1"
    refused = [line for line in federation.log(who).splitlines() if "is not in allow_list" in line and line not in said]
    assert any(component in line for line in refused for component in NAMED)


def test_a_jobs_own_settings_and_transports_are_not_loaded(federation: Federation, tmp_path: Path) -> None:
    """The job's files lie under the kit, but the kit's own settings win; the job itself is an ordinary one and runs."""
    proof = tmp_path / "proof"
    assert federation.wait(federation.submit(drivers(federation, proof), LEAD)) == "FINISHED:COMPLETED"
    assert not proof.exists()


def test_a_site_that_asks_for_approval_runs_what_was_approved_and_nothing_else(federation: Federation) -> None:
    """The log says what to type; a changed job is another job."""
    job, kit = federation.export(config()), federation.kit("site-2")
    number, sites = _run(federation, job)
    assert sites == ["site-1"]
    command = re.findall(rf"approve \S*{number}\S* --kit {re.escape(str(kit))}", federation.log("site-2"))[0]
    assert CliRunner().invoke(app, [*command.split(), "--yes"]).exit_code == 0
    assert _run(federation, job)[1] == ["site-1", "site-2"]
    (job / "app/config/notes.txt").write_text("another")
    assert _run(federation, job)[1] == ["site-1"]
    assert (kit / "local/approved.json").stat().st_mode & 0o077 == 0


def _run(federation: Federation, job: Path) -> tuple[str, list[str]]:
    """Submit a job, wait for it and return its id and the sites that took part."""
    number = federation.submit(job, LEAD)
    assert federation.wait(number) == "FINISHED:COMPLETED"
    (round,) = federation.events("concluded")
    return number, round["sites"]


def test_modules_in_the_callers_folder_are_not_loaded(tmp_path: Path) -> None:
    """start.sh is called in a folder where somebody has put modules named as Python's own."""
    with Federation(tmp_path, {"site-1": {}}) as federation:
        for name in ("enum", "json", "socket", "consilium"):
            (tmp_path / f"{name}.py").write_text(
                f"open({str(tmp_path / 'proof')!r}, 'a').close()\nraise SystemExit('hostile')\n"
            )
        federation.start()
        assert federation.wait(federation.submit(federation.export(config()), LEAD)) == "FINISHED:COMPLETED"
        assert not (tmp_path / "proof").exists()
        federation.shutdown()
