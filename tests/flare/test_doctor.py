"""What the doctor says of a startup kit: a good one is well, and every way to weaken it is seen."""

import json
import shutil
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from consilium.flare import doctor
from consilium.flare.doctor import examine
from consilium.flare.provision import provision
from tests.deployment.federation import free_port


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
    return Path(shutil.copytree(made / "clinic", tmp_path / "clinic"))


@pytest.fixture
def server(made: Path) -> Iterator[None]:
    """Answer one TLS connection as the server of the kits would."""
    startup = made / "localhost" / "startup"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(startup / "server.crt", startup / "server.key")
    context.load_verify_locations(startup / "rootCA.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    port = int(json.loads((startup / "fed_server.json").read_text())["servers"][0]["service"]["target"].rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)) as listener:

        def answer() -> None:
            with suppress(ssl.SSLError):  # a client may hang up on us
                context.wrap_socket(listener.accept()[0], server_side=True).close()

        thread = threading.Thread(target=answer)
        thread.start()
        yield
        thread.join(10)


def problems(kit: Path) -> dict[str, str]:
    return {f.check: f.line() for f in examine(kit) if not f.ok}


def change(name: str, edit: Callable[[Any], None]) -> Callable[[Path], None]:
    def apply(kit: Path) -> None:
        path = kit / "local" / name
        values = json.loads(path.read_text())
        edit(values)
        path.write_text(json.dumps(values))

    return apply


def test_a_new_kit_lacks_only_data_and_reaches_its_server(kit: Path, server: None) -> None:
    found = {f.check: f for f in examine(kit)}
    assert [f.line() for f in found.values() if not f.ok] == [
        "PROBLEM  data list: none in site.yaml; set `datalist:`; without it only jobs with generated data run"
    ]
    assert found["server"].found.endswith("answers, and is of this project")
    assert found["signature"].found == "startup/ is as it was made"


def test_a_server_that_is_not_there_is_a_problem(kit: Path) -> None:
    assert "Connection refused" in problems(kit)["server"]


def test_a_stranger_in_the_servers_place_is_a_problem(kit: Path, made: Path, tmp_path: Path, server: None) -> None:
    stranger = provision(made.parents[1] / "sites.yml", tmp_path / "other")
    shutil.copy(stranger / "clinic/startup/rootCA.pem", kit / "startup/rootCA.pem")
    found = problems(kit)
    assert "CERTIFICATE_VERIFY_FAILED" in found["server"]
    assert "was altered" in found["signature"]


@pytest.mark.parametrize(
    ("weaken", "check", "says"),
    [
        (change("resources.json", lambda r: r.update(class_allow_list=["consilium"])), "allow-list", "consilium allow KIT"),
        (change("resources.json", lambda r: r["class_allow_list"].append("*")), "allow-list", "every class"),
        (change("resources.json", lambda r: r.update(class_list_enforcement_mode="warn")), "allow-list", "mode warn"),
        (change("resources.json", lambda r: r.pop("allow_log_streaming")), "log streaming", "error logs"),
        (change("privacy.json", lambda p: p.pop("default_scope")), "privacy scope", "default None"),
        (change("privacy.json", lambda p: p["scopes"].append({"name": "open"})), "privacy scope", "2 scopes"),
        (change("privacy.json", lambda p: p["scopes"][0].pop("task_data_filters")), "privacy scope", "GuardTaskFilter"),
        (change("privacy.json", lambda p: p["scopes"][0].pop("task_result_filters")), "privacy scope", "GuardResultFilter"),
        (change("authorization.json", lambda a: a["permissions"].update(lead="any")), "rights", "lead has byoc: any"),
        (change("authorization.json", lambda a: a["permissions"]["lead"].update(shell_commands="o:site")), "rights", "o:site"),
        (lambda kit: (kit / "local/authorization.json").unlink(), "rights", "consilium provision SITES_YML --local KIT"),
        (lambda kit: (kit / "local/privacy.json").write_text("{"), "privacy scope", "not valid JSON"),
        (lambda kit: (kit / "local/site.yaml").write_text("device: gpu"), "site.yaml", "device: 'gpu'"),
        (lambda kit: (kit / "startup/fed_client.json").open("a").write(" "), "signature", "was altered"),
        (lambda kit: (kit / "startup/client.crt").unlink(), "startup kit", "startup/client.crt is missing"),
    ],
)
def test_every_weakened_kit_is_seen(weaken: Callable[[Path], None], check: str, says: str, kit: Path) -> None:
    weaken(kit)
    assert says in problems(kit)[check]


def test_an_unsigned_kit_is_as_nvflare_package_makes_it(kit: Path) -> None:
    (kit / "startup/signature.json").unlink()
    assert "signature" not in problems(kit)


@pytest.mark.parametrize(("days", "says"), [(-1, "set the clock"), (345, "days are left"), (400, "set the clock")])
def test_the_clock_is_held_against_the_certificate(days: int, says: str, kit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime.now(UTC) + timedelta(days=days)

    monkeypatch.setattr(doctor, "datetime", Clock)
    assert says in problems(kit)["clock"]


def test_the_servers_kit_is_told_apart(made: Path) -> None:
    assert "is the server's" in problems(made / "localhost")["startup kit"]
