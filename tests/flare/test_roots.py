"""A root with another key, put in beside the former one: OpenSSL says who trusts whom, at each step."""

import errno
import json
import os
import shutil
import ssl
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from nvflare.lighter.impl import cert
from nvflare.lighter.utils import Identity, generate_cert, serialize_cert, verify_folder_signature

from consilium.core.errors import ConfigError, ConsiliumError
from consilium.flare.kit.provision import FORMER, ROOT, provision
from consilium.flare.kit.renewal import renew, start_root_key_rollover, update_kit
from tests.conftest import run
from tests.flare.running import earlier
from tests.flare.test_certificates import deployment


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with prod_00 of the former root, prod_01 of the new one beside it, and prod_02 of the new one alone."""
    folder = tmp_path_factory.mktemp("roots")
    sites = deployment(folder)
    with earlier(4):
        provision(sites, folder / "kits")
    with pytest.raises(ConfigError, match="no root is followed"):
        renew(sites, folder / "kits", root="only-new")
    with earlier():
        renew(sites, folder / "kits", root="new")
    with pytest.raises(ConfigError, match="is being put in already"):
        renew(sites, folder / "kits", root="new")
    renew(sites, folder / "kits", ["localhost"], root="only-new")
    assert FORMER not in json.loads((folder / "kits/test/state/cert.json").read_text())
    return folder / "kits/test"


def meet(server: Path, other: Path) -> bool:
    """Tell whether OpenSSL lets a server and another participant of these kits shake hands, each proving who it is."""
    sides = [ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)]
    for context, kit in zip(sides, (server, other), strict=True):
        (own,) = (path for path in (kit / "startup").glob("*.crt"))
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(kit / "startup/rootCA.pem")
        context.load_cert_chain(own, own.with_suffix(".key"))
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = sides[1].wrap_bio(back, there, server_hostname="localhost")
    serving = sides[0].wrap_bio(there, back, server_side=True)
    try:
        for side in (client, serving, client, serving):
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
        return client.version() is not None and serving.version() is not None
    except ssl.SSLError:
        return False


@pytest.mark.parametrize("name", ["clinic", "a@hub.example"])
def test_root_change_keeps_all_connected(kits: Path, name: str) -> None:
    former, both, only = (kits / f"prod_0{step}" for step in range(3))
    assert meet(former / "localhost", former / name)
    assert not meet(former / "localhost", both / name)  # so the server changes first
    assert meet(both / "localhost", former / name)
    assert meet(both / "localhost", both / name)
    assert meet(only / "localhost", both / name)
    assert not meet(only / "localhost", former / name)  # who has not changed by then is out


def test_new_root_kits_need_a_fingerprint(kits: Path, tmp_path: Path) -> None:
    for kit in kits.glob("prod_01/*/startup"):
        assert verify_folder_signature(str(kit), str(kit / "rootCA.pem"), True, "signature.json")
    former, new = (x509.load_pem_x509_certificate((kits / f"prod_0{n}/clinic/startup/rootCA.pem").read_bytes()) for n in (0, 1))
    assert (former.subject.rfc4514_string(), new.subject.rfc4514_string()) == ("CN=test", "CN=test-2")
    for name in ("clinic", "localhost"):
        shutil.copytree(kits / "prod_00" / name, tmp_path / name, symlinks=True)
    with pytest.raises(ConfigError, match="another key"):
        update_kit(tmp_path / "clinic", kits / "prod_01/clinic")
    told = new.fingerprint(hashes.SHA256()).hex()
    update_kit(tmp_path / "clinic", kits / "prod_01/clinic", told)
    update_kit(tmp_path / "localhost", kits / "prod_01/localhost")  # it trusts the former root as before
    assert meet(tmp_path / "localhost", tmp_path / "clinic")
    update_kit(tmp_path / "localhost", kits / "prod_02/localhost", told)
    assert meet(tmp_path / "localhost", tmp_path / "clinic")


def test_expired_root_is_not_replaced(kits: Path) -> None:
    state = json.loads((kits / "state/cert.json").read_text())
    key, me, before = load_pem_private_key(state["root_pri_key"].encode(), None), Identity("test"), datetime.now(UTC)
    start, end = before - timedelta(days=9), before - timedelta(days=1)
    ended = generate_cert(me, me, key, key.public_key(), ca=True, not_valid_before=start, not_valid_after=end)
    with pytest.raises(ConfigError, match="root has ended"):
        start_root_key_rollover(state | {"root_cert": serialize_cert(ended).decode()}, 30)


def test_new_root_makes_all_kits(kits: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    before = (kits / "state/cert.json").read_bytes()
    sites, folder = kits.parents[1] / "sites.yml", kits.parent
    assert run(monkeypatch, "renew", sites, "-o", folder, "--root", "new", "--only", "clinic") != 0
    assert "--only: not with --root new" in capsys.readouterr().err
    assert (kits / "state/cert.json").read_bytes() == before


def test_failed_renewal_keeps_the_root_key_and_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FLARE overwrites cert.json in place: on a full disk the root key was gone, and --root new had begun without kits."""
    sites, folder = deployment(tmp_path), tmp_path / "kits"
    state = provision(sites, folder).parent / "state/cert.json"
    before = state.read_bytes()

    def full_disk(self: cert._CertState) -> None:
        state.write_text('{"root_cert": ')
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(cert._CertState, "persist", full_disk)
        with pytest.raises(ConsiliumError, match="No space left"):
            renew(sites, folder, root="new")
        assert state.read_bytes() == before
        with pytest.raises(ConsiliumError, match="No space left"):
            provision(sites, folder)
    assert state.read_bytes() == before
    assert state.stat().st_mode & 0o077 == 0
    assert [path.name for path in state.parent.iterdir()] == ["cert.json"]
    renew(sites, folder, root="new")
    assert json.loads(state.read_text())[FORMER]["cert"] == json.loads(before)[ROOT]


def test_who_comes_back_after_a_change_of_root_gets_a_certificate_of_the_new_one(tmp_path: Path) -> None:
    sites, folder = deployment(tmp_path), tmp_path / "kits"
    whole = sites.read_text()
    raw = yaml.safe_load(whole) | {"sites": [{"name": "ward", "org": "x"}]}
    provision(sites, folder)
    sites.write_text(yaml.safe_dump(raw))
    renew(sites, folder, root="new")
    sites.write_text(whole)
    kit = provision(sites, folder, ["clinic"]) / "clinic"
    own, root = (x509.load_pem_x509_certificate((kit / "startup" / name).read_bytes()) for name in ("client.crt", "rootCA.pem"))
    own.verify_directly_issued_by(root)


def test_damaged_root_key_names_the_copy(tmp_path: Path) -> None:
    sites, folder = deployment(tmp_path), tmp_path / "kits"
    state = folder / "test/state/cert.json"
    copy = state.with_name("cert.json.before")
    state.parent.mkdir(parents=True)
    state.write_text('{"root_cert": ')
    with pytest.raises(ConfigError, match="is damaged; restore it from a backup"):
        renew(sites, folder)
    copy.write_text("the content from before")
    for make in (renew, provision):
        with pytest.raises(ConfigError, match=f"is damaged; run `mv {copy} {state}`"):
            make(sites, folder)
    assert copy.read_text() == "the content from before"
