"""Runs of jobs over FLARE, see tests.flare.running, and the kits of a server and one site."""

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography.hazmat.primitives import serialization
from nvflare.lighter.impl import cert

from consilium.flare.kit import kit_reader, provision, renewal
from tests.deployment.federation import free_port
from tests.flare.running import Runner, earlier, in_simulator, in_this_process

KEYS, GENERATE = list[Any](), cert.generate_keys
READERS = (kit_reader, provision, renewal)
"""Modules that read private keys. Each reading checks the key, which takes as long as a small test."""


class Keys:
    """Keys for kits, made once a process: making one takes a tenth of a second. `taken`: how many are in use."""

    taken = 0

    def __call__(self) -> Any:
        """Return the next, as FLARE's function does."""
        if self.taken == len(KEYS):
            KEYS.append(GENERATE())
        self.taken += 1
        return KEYS[self.taken - 1]


@pytest.fixture(autouse=True, scope="module")
def _equal_keys() -> Iterator[Keys]:
    """Give the kits of every module the same keys, which differ among those of a test and those that its module shares."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cert, "generate_keys", keys := Keys())
        for module in READERS:
            patch.setattr(module, "load_pem_private_key", serialization.load_pem_private_key)  # which checks each once
        yield keys


@pytest.fixture(autouse=True)
def _keys_of_a_test(_equal_keys: Keys) -> Iterator[None]:
    """Take the keys back that a test has had; its module's kits are made before it, and keep theirs."""
    before = _equal_keys.taken
    yield
    _equal_keys.taken = before


@pytest.fixture(params=["one-process", pytest.param("simulator", marks=pytest.mark.slow)])
def flare(request: pytest.FixtureRequest, tmp_path: Path) -> Runner:
    """Run a job over FLARE's components in this process and, in the slow suite, in FLARE's simulator too."""
    return partial(in_this_process if request.param == "one-process" else in_simulator, tmp_path / "flare")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the kits of a server on this machine and one site."""
    folder, port = tmp_path_factory.mktemp("kits"), free_port()
    server = {"name": "localhost", "org": "hub", "port": port, "state": str(folder / "state")}
    admins = [{"name": "a@hub.example", "org": "hub", "role": "lead"}]
    raw = {"name": "test", "server": server, "sites": [{"name": "clinic", "org": "clinic"}], "admins": admins}
    (folder / "sites.yml").write_text(yaml.safe_dump(raw))
    with earlier():
        return provision.provision(folder / "sites.yml", folder)


@pytest.fixture
def kit(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "clinic", tmp_path / "clinic", symlinks=True))
