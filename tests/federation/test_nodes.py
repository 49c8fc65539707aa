"""Ranks on other machines: who is let in, where the site listens, and what it says when nobody calls."""

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import AuthenticationError, connection
from pathlib import Path
from typing import NoReturn

import psutil
import pytest

from consilium.client.build import build_site
from consilium.client.ddp_rendezvous import gather, read_secret
from consilium.config.job import JobConfig
from consilium.config.site import NodesConfig, SiteConfig, load_site
from consilium.core.errors import ConfigError, ConsiliumError
from consilium.core.messages import SiteInfo
from consilium.federation.job import assemble_job
from tests.conftest import run, small_config
from tests.federation.test_ranks import same, trained


@pytest.fixture
def nodes(tmp_path: Path) -> NodesConfig:
    secret = tmp_path / "secret"
    secret.write_bytes(b"0123456789abcdef")
    secret.chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as free:
        return NodesConfig(address=f"127.0.0.1:{free.getsockname()[1]}", secret=secret, ranks=1, wait=5)


def call(place: tuple[str, int], secret: bytes) -> None:
    """Call as a rank does, with the standard library's own client."""
    while True:
        try:
            connection.Client(place, authkey=secret).close()
        except (ConnectionRefusedError, ConnectionResetError):
            continue
        except (AuthenticationError, EOFError):
            return
        return


def test_only_a_caller_with_the_secret_is_let_in(nodes: NodesConfig) -> None:
    def both() -> None:
        call(nodes.place, b"another secret, as long")
        call(nodes.place, b"0123456789abcdef")

    thread = threading.Thread(target=both)
    thread.start()
    (found,) = gather(nodes)
    thread.join()
    assert found.machine == "127.0.0.1"
    found.end()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ECONNABORTED])
def test_a_door_that_strangers_hold_shut_for_a_while_ends_nothing(
    number: int, nodes: NodesConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept, shut = socket.socket.accept, [OSError(number, "shut")]
    monkeypatch.setattr(socket.socket, "accept", lambda door: accept(door) if not shut else _raised(shut.pop()))
    thread = threading.Thread(target=call, args=(nodes.place, b"0123456789abcdef"))
    thread.start()
    (found,) = gather(nodes)
    thread.join()
    found.end()


def _raised(error: OSError) -> NoReturn:
    raise error


def test_without_the_secret_nobody_comes(nodes: NodesConfig) -> None:
    thread = threading.Thread(target=call, args=(nodes.place, b"another secret, as long"))
    thread.start()
    with pytest.raises(ConsiliumError, match=r"0 of 1 ranks .*0\.2 s; .*`consilium rank`"):
        gather(nodes.model_copy(update={"wait": 0.2}))
    thread.join()


def test_a_stranger_who_sends_a_byte_now_and_then_is_hung_up_on_in_time(nodes: NodesConfig) -> None:
    """Each of its bytes would come within a limit of its own, and a message may have 256."""
    ended = []

    def drip() -> None:
        link = reached(nodes.place)
        link.sendall(b"\0\0\0\x64")
        with suppress(OSError):
            for _ in range(100):
                time.sleep(0.05)
                link.sendall(b"a")
            ended.append("of itself")
        link.close()

    thread = threading.Thread(target=drip)
    thread.start()
    with pytest.raises(ConsiliumError, match=r"0 of 1 ranks called"):
        gather(nodes.model_copy(update={"wait": 0.3}))
    thread.join()
    assert not ended


def test_strangers_who_say_nothing_do_not_use_up_the_time_of_the_ranks(nodes: NodesConfig) -> None:
    """One after the other they would have it all: each may take longer than the site waits."""
    silent: list[socket.socket] = []

    def call_behind_them() -> None:
        silent.extend(reached(nodes.place) for _ in range(3))
        call(nodes.place, b"0123456789abcdef")

    thread = threading.Thread(target=call_behind_them)
    thread.start()
    (found,) = gather(nodes)
    thread.join()
    found.end()
    for one in silent:
        one.close()


def reached(place: tuple[str, int]) -> socket.socket:
    while True:
        try:
            return socket.create_connection(place)
        except ConnectionRefusedError:
            continue


def test_the_site_listens_at_its_address_only_and_no_longer_than_it_gathers(nodes: NodesConfig) -> None:
    host, port = nodes.place
    thread = threading.Thread(target=call, args=(nodes.place, b"0123456789abcdef"))
    elsewhere = []

    def look() -> None:
        elsewhere.append(socket.socket().connect_ex(("127.0.0.2", port)))
        thread.start()

    threading.Timer(0.1, look).start()
    for one in gather(nodes):
        one.end()
    thread.join()
    assert elsewhere[0] != 0
    assert socket.socket().connect_ex((host, port)) != 0


def test_an_address_that_is_not_ours_is_named(nodes: NodesConfig) -> None:
    with pytest.raises(ConsiliumError, match=r"site\.yaml: nodes\.address: 192\.0\.2\.1:5: "):
        gather(nodes.model_copy(update={"address": "192.0.2.1:5"}))


@pytest.mark.parametrize(
    ("content", "mode", "why"), [(b"short", 0o600, "of 5 bytes"), (b"0" * 32, 0o640, "chmod 600"), (None, 0, "no such file")]
)
def test_a_secret_that_is_none_is_refused(content: bytes | None, mode: int, why: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "secret").write_bytes(content)
        (tmp_path / "secret").chmod(mode)
    with pytest.raises(ConfigError, match=why):
        read_secret(tmp_path / "secret")


@pytest.mark.parametrize(
    "address",
    ["0.0.0.0:29500", "localhost:29500", "0:5", "0x0.0:5", "LocalHost.:5", "10.0.0.1", "10.0.0.1:0", "10.0.0.1:70000"],
)
def test_an_address_of_no_one_network_is_refused(address: str, tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text(f"nodes: {{address: '{address}', secret: secret, ranks: 1}}")
    with pytest.raises(ConfigError, match=r"nodes\.address"):
        load_site(tmp_path / "site.yaml")


def test_the_command_names_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(monkeypatch, "rank", "nowhere", "--secret", tmp_path / "secret") == 2
    assert "give HOST:PORT" in capsys.readouterr().err
    assert run(monkeypatch, "rank", "10.0.0.1:29500", "--secret", tmp_path / "secret") == 2
    assert "no such file" in capsys.readouterr().err


@pytest.fixture
def other(nodes: NodesConfig) -> Iterator[psutil.Popen]:
    """The command on the other machine."""
    words = ["rank", nodes.address, "--secret", str(nodes.secret), "--device", "cpu", "--threads", "1"]
    command = [sys.executable, "-c", "from consilium.cli.main import main; main()", *words]
    with psutil.Popen(command, stdout=subprocess.DEVNULL) as process:
        yield process
        process.terminate()


@pytest.mark.slow
def test_a_rank_of_another_machine_shares_the_work_and_calls_again_when_it_has_failed(
    nodes: NodesConfig, other: psutil.Popen, tmp_path: Path
) -> None:
    """Over loopback: the update of one device; the rank is killed in a second run, and the third works again."""
    raw = small_config("fedit", rounds=1, local_epochs=2, batch_size=3, optimizer="sgd", lr=0.5, validate={"stages": []})
    raw = raw.model_dump()
    raw["data"]["phantoms"]["training"] = 5
    job = assemble_job(JobConfig.model_validate(raw))
    config = SiteConfig(device="cpu", nodes=nodes.model_copy(update={"wait": 60}), base="sharded")
    _, alone = trained(job, tmp_path / "alone", device="cpu")
    killed = list[int]()

    def seen(event: object) -> None:
        if '"step"' in str(event).replace("'", '"') and not killed:
            (child,) = [one for one in other.children() if "spawn_main" in " ".join(one.cmdline())]
            killed.append(child.pid)
            os.kill(child.pid, signal.SIGKILL)

    site = build_site(job, "site-1", config, tmp_path / "site", seen)
    sent = job.strategy.payload(job.strategy.initialize(job.initial), SiteInfo("site-1", 5))
    with pytest.raises(ConsiliumError, match=r"site\.yaml: devices: rank 1 on 127\.0\.0\.1: .*gone"):
        site.train("run", sent)
    assert killed
    same(alone, site.train("run", sent))
    site.close()
    children = other.children(recursive=True)
    other.terminate()
    assert not psutil.wait_procs(children, timeout=20)[1]
