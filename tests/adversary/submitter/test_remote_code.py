"""A certified submitter whose job carries configuration only tries to run a program at the sites and at the server."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import small_config
from tests.deployment.federation import LEAD, Federation

CLIENT, SERVER = "config_fed_client.json", "config_fed_server.json"
TASKS = ["hello", "train", "evaluate"]


def shell(proof: Path) -> dict[str, Any]:
    """The component of the first finding: FLARE's provisioning, re-exported by ours, builds whatever it is told to."""
    popen = {"config_type": "dict", "path": "subprocess.Popen", "args": {"args": ["touch", str(proof)]}}
    project = {"project_dict": {"builders": [popen]}}
    return {"id": "x", "path": "consilium.flare.provision.prepare_builders", "args": project}


def command(proof: Path) -> dict[str, Any]:
    """Our own command line as a component."""
    words = ["data", "phantoms", str(proof), "--sites", "1", "--training", "1"]
    return {"id": "x", "path": "consilium.cli.app", "args": {"args": words, "standalone_mode": False}}


def overwrite(proof: Path) -> dict[str, Any]:
    """A function that one of our modules has imported: it writes any file."""
    return {"id": "x", "path": "consilium.adapters.lora.save_file", "args": {"tensors": {}, "filename": str(proof)}}


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
    "as argument at the server": (SERVER, lambda c, proof: argument(c["workflows"][0], "aggregator_id", proof)),
}


def attack(federation: Federation, name: str, proof: Path) -> Path:
    """Return a job folder with one attack in it."""
    file, edit = ATTACKS[name]
    job = federation.export(small_config("fedit", rounds=1))
    path = job / "app/config" / file
    config = json.loads(path.read_text())
    edit(config, proof)
    path.write_text(json.dumps(config))
    return job


def drivers(federation: Federation, proof: Path) -> Path:
    """Return a job whose config folder has FLARE's own comm_config.json, which names a folder of transports, and one there.

    FLARE reads the first file of that name that it finds anywhere under the kit.
    """
    job = federation.export(small_config("fedit", rounds=1))
    (job / "app/config/transport.py").write_text(f"open({str(proof)!r}, 'w').close()\n")
    kits = [str(federation.kit(name)) for name in ("server", *federation.sites)]
    (job / "app/config/comm_config.json").write_text(json.dumps({"comm_driver_path": ":".join([".", "..", *kits])}))
    return job


@pytest.mark.slow
def test_no_config_only_job_runs_a_program(tmp_path: Path) -> None:
    with Federation(tmp_path, {"site-1": {}, "site-2": {}}) as federation:
        federation.start()
        for number, name in enumerate(ATTACKS):
            proof = tmp_path / f"proof-{number}"
            job = federation.submit(attack(federation, name, proof), LEAD)
            ended = federation.wait(job)
            print(name, ended, proof.exists())
        proof = tmp_path / "proof-driver"
        job = federation.submit(drivers(federation, proof), LEAD)
        print("drivers", federation.wait(job), proof.exists())
        print(sorted(p.name for p in federation.folder.rglob("proof*")))
