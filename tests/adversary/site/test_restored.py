"""A site whose files were restored from a backup, in part or whole, and a server that wants rounds again for nothing."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from nvflare.apis.shareable import Shareable
from typer.testing import CliRunner

from consilium import __version__
from consilium.cli.main import app
from consilium.core.errors import ConfigError, Reason
from consilium.core.messages import Hello, Payload
from consilium.core.storage import digest
from consilium.flare.job import wire
from consilium.privacy import audit_log
from consilium.server.coordinator import FILE, Coordinator, Seals
from tests.adversary.server.conftest import RECORD_LEVEL, SITE_LEVEL, Client, MakeClient, client
from tests.conftest import small_config

assert client  # a fixture
MORE = {"training": small_config("fedit", rounds=4).model_dump()["training"]}
SEAL = "5ea1" * 16


def round_of(site: Client, round: int, value: float = 0.0) -> str:
    """Return the digest of what the site answers a round with, or its word; `value` is added to all that it is sent."""
    sent = site.broadcast(round)
    message = wire.encode(Payload(round, 0, {n: t + value for n, t in sent.tensors.items()}), "run-1", update=False)
    answer = site.ask("train", message)
    return wire.reason_of(answer) or digest(wire.decode(answer)[0].tensors)


def hello(site: Client, seal: str) -> Shareable:
    return site.ask("hello", wire.encode_hello("run-1", seal))


def seal_of(answer: Shareable) -> str:
    """Return the ledger's seal as a server finds it in an answer."""
    return str(answer[wire.HELLO]["ledger"])


def copy_of(state: Path, chosen: Callable[[Path], bool]) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in state.rglob("*") if path.is_file() and chosen(path)}


def put_back(state: Path, kept: dict[Path, bytes], chosen: Callable[[Path], bool]) -> None:
    """Restore chosen files as they were: what is newer goes."""
    for path in copy_of(state, chosen).keys() - kept.keys():
        path.unlink()
    for path, content in kept.items():
        path.write_bytes(content)


def of_name(*names: str) -> Callable[[Path], bool]:
    return lambda path: path.name in names


PARTS: dict[str, Callable[[Path], bool]] = {
    "the ledger": of_name("ledger.sqlite"),
    "the record": of_name("audit.jsonl"),
    "the kept release": of_name("released.safetensors"),
    "the newest round": of_name("begun.json"),
    "the runs' homes": of_name("homes.json"),
    "ledger and kept release": of_name("ledger.sqlite", "released.safetensors"),
    "the run's folder": lambda path: "one" in path.parts,
    "all but the ledger": lambda path: path.name != "ledger.sqlite",
    "all but the record": lambda path: path.name != "audit.jsonl",
}


AT_RECORD_LEVEL = ("the ledger", "the record", "the newest round", "the run's folder")
"""Parts that every run of the suite brings back at record level too, whose charges the guard keeps in another order."""


@pytest.mark.parametrize(
    ("part", "privacy"),
    [(part, SITE_LEVEL) for part in PARTS]
    + [(part, RECORD_LEVEL) for part in AT_RECORD_LEVEL]
    + [pytest.param(part, RECORD_LEVEL, marks=pytest.mark.slow) for part in PARTS if part not in AT_RECORD_LEVEL],
)
def test_no_part_of_a_sites_state_that_is_brought_back_has_a_round_trained_again(
    part: str, privacy: dict, client: MakeClient, tmp_path: Path
) -> None:
    """The server sends other values, so that a second training would show itself by other noise on the same data."""
    site = client(privacy, more=MORE)
    answers = [round_of(site, 0)]
    kept = copy_of(tmp_path, PARTS[part])
    answers += [round_of(site, 1), round_of(site, 2)]
    rows = len(site.guard.ledger.entries())
    put_back(tmp_path, kept, PARTS[part])
    again = client(privacy, more=MORE)  # a new process
    for round in (1, 2, 0):
        assert round_of(again, round, value=0.01) in (answers[round], Reason.LEDGER, Reason.TASK)
    assert not again.trainer.did
    round_of(again, 3)
    assert len(again.guard.ledger.entries()) >= rows or not again.trainer.did


@pytest.fixture
def restored(client: MakeClient, tmp_path: Path) -> tuple[str, MakeClient]:
    """Two rounds and a hello, whose seal is returned; then the whole state as it was after the first round."""
    site = client(SITE_LEVEL, more=MORE)
    round_of(site, 0)
    kept = copy_of(tmp_path, lambda path: True)
    round_of(site, 1)
    seal = seal_of(hello(site, ""))
    put_back(tmp_path, kept, lambda path: True)
    return seal, client


def test_a_whole_state_that_is_brought_back_is_noticed_by_the_seal_that_the_server_sends(
    restored: tuple[str, MakeClient],
) -> None:
    """Ledger and records fit, so the site released the second round again, with other noise, and its ledger counted one."""
    seal, make = restored
    site = make(SITE_LEVEL, more=MORE)
    assert wire.reason_of(hello(site, "")) is None
    site = make(SITE_LEVEL, more=MORE)
    assert wire.reason_of(hello(site, seal)) is Reason.LEDGER
    assert not site.trainer.did[1:]
    assert wire.reason_of(hello(site, "")) is None  # nothing of what a server says stays


def test_the_remedy_in_the_sites_log_works_and_is_on_record(restored: tuple[str, MakeClient], tmp_path: Path) -> None:
    seal, make = restored
    (tmp_path / "local").mkdir()
    place = tmp_path / "local" / "site.yaml"
    place.write_text(f"state: {tmp_path}\n")
    with pytest.raises(ConfigError, match="no seal; give the 64 hex digits"):
        CliRunner().invoke(app, ["privacy", "accept", str(place), "--reason", "x", "--seal", "../x"], catch_exceptions=False)
    command = ["privacy", "accept", str(place), "--reason", "disk failed", "--seal", seal, "--format", "json"]
    assert json.loads(CliRunner().invoke(app, command, catch_exceptions=False).stdout)["lost"] == [seal]
    (line,) = audit_log.read_with_epsilon(tmp_path / audit_log.FILE)["messages"]
    assert (line["kind"], line["lost"]) == ("acceptance", [seal])
    assert wire.reason_of(hello(make(SITE_LEVEL, more=MORE), seal)) is None
    assert wire.reason_of(hello(make(SITE_LEVEL, more=MORE), SEAL)) is Reason.LEDGER  # what else is lost later is not forgiven


def test_a_seal_that_the_ledger_has_lets_the_site_in_whichever_row_it_is_of(client: MakeClient) -> None:
    site = client(SITE_LEVEL, more=MORE)
    seals = [seal_of(hello(site, ""))]
    for round in range(2):
        round_of(site, round)
        seals.append(seal_of(hello(site, seals[-1])))
    assert len(set(seals)) == 3
    for seal in seals:
        assert wire.reason_of(hello(client(SITE_LEVEL, more=MORE), seal)) is None


@pytest.mark.parametrize("seal", ["x", SEAL + "0", SEAL.upper(), 7, [SEAL], {"a": 1}])
def test_what_is_no_seal_is_no_hello(seal: object, client: MakeClient) -> None:
    site = client(SITE_LEVEL)
    message = wire.encode_hello("run-1", "")
    message.set_header(wire.SEAL, seal)
    assert wire.reason_of(site.ask("hello", message)) is Reason.TASK
    assert not site.trainer.did


def test_the_server_keeps_the_last_seal_of_each_site_over_runs(client: MakeClient, tmp_path: Path) -> None:
    job, path = client(None).job, tmp_path / "server" / FILE
    for number in range(2):
        coordinator = Coordinator(job, tmp_path / f"run-{number}", lambda event: None, seals=Seals(path))
        assert coordinator.seals.last_seal("site-1") == ("" if number == 0 else "a" * 64)
        coordinator.welcome(said("site-1", "a" * 64))
        coordinator.welcome(said("site-2", ""))
        coordinator.close()
    assert Seals(path).last_seal("site-2") == ""
    assert path.stat().st_mode & 0o077 == 0


def said(name: str, seal: str) -> Hello:
    return Hello(name, 4, False, __version__, ledger=seal)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"site-1": 7}', '{"site-1": {"ledger": "../x"}}'])
def test_a_damaged_file_of_seals_costs_no_job(text: str, tmp_path: Path) -> None:
    path = tmp_path / FILE
    path.write_text(text)
    assert Seals(path).last_seal("site-1") == ""
    Seals(path).note("site-1", SEAL)
    assert Seals(path).last_seal("site-1") == SEAL
    path.unlink()
    path.mkdir()
    Seals(path).note("site-1", SEAL)
    assert Seals(path).last_seal("site-1") == ""
