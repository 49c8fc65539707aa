"""Runs of jobs over FLARE, see tests.flare.running, and the kits of a server and one site."""

import shutil
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import yaml
from nvflare.lighter.impl import cert

from consilium.flare.kit.provision import provision
from tests.deployment.federation import free_port
from tests.flare.running import Runner, in_simulator, in_this_process

KEYS = list[Any]()


@pytest.fixture(autouse=True, scope="module")
def _equal_keys() -> Iterator[None]:
    """Give the kits of every module the same keys, which differ within it: making one takes a tenth of a second."""
    make, numbers = cert.generate_keys, count()

    def taken() -> Any:
        if (number := next(numbers)) == len(KEYS):
            KEYS.append(make())
        return KEYS[number]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cert, "generate_keys", taken)
        yield


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
    return provision(folder / "sites.yml", folder)


@pytest.fixture
def kit(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "clinic", tmp_path / "clinic", symlinks=True))
