"""Evidence of a run: made at a site, checked elsewhere; every way to change or forge it is seen."""

import hashlib
import json
import shutil
import sqlite3
import tracemalloc
import zipfile
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from nvflare.lighter.utils import load_crt, load_private_key_file, sign_content

from consilium.config.privacy import BudgetConfig
from consilium.core.errors import ConfigError, ConsiliumError
from consilium.federation.run_folders import STATE
from consilium.flare.kit.certificates import fingerprints
from consilium.flare.kit.evidence_archive import ACCEPTED, LEDGER, MANIFEST, SIGNATURE, verify, verify_chains
from consilium.flare.kit.provision import provision
from consilium.flare.kit.renewal import KEEP, NEW_ROOT, renew
from consilium.privacy.accounting import DISCRETE
from consilium.privacy.audit_log import FILE, AuditLog
from consilium.privacy.ledger import Entry, Ledger
from tests.conftest import run
from tests.flare.test_certificates import set_clock
from tests.privacy.test_ledger import old_ledger

ROW = Entry(
    dataset="ward", unit="site", adjacency="zero-out", trust="local", job="fundus", run="r1", round=0, phase=0,
    noise_multiplier=4.0, sample_rate=1.0, count=1, clip=1.0, private=True,
)  # fmt: skip


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    server = {"name": "localhost", "org": "hub", "port": 9, "state": str(folder / "state")}
    people = [{"name": "a@hub.example", "org": "hub", "role": "lead"}]
    sites = [{"name": name, "org": name} for name in ("clinic", "other")]
    (folder / "sites.yml").write_text(yaml.safe_dump({"name": "t", "server": server, "sites": sites, "admins": people}))
    return provision(folder / "sites.yml", folder / "kits")


@pytest.fixture(scope="module")
def clinic(hub: Path) -> Path:
    """Return the kit of a site that has sent two messages in run fundus-1, of which one cost privacy."""
    kit, job = hub / "clinic", "0c5d0bd4-7b0c-4f0e-8c1e-000000000000"
    record = AuditLog(kit / STATE / "runs/fundus-1/sites/clinic/r1" / FILE)
    record.add({"site": "clinic", "run": "r1", "experiment": "fundus-1", "kind": "hello", "flare_job": job})
    record.add({"site": "clinic", "run": "r1", "kind": "train", "round": 0, "phase": 0, "flare_job": job, "metrics": {}})
    Ledger(kit / STATE / "ledger.sqlite").charge_once(ROW, {"site": BudgetConfig(epsilon=50)})
    config = kit / job / "app_clinic/config/job.yaml"
    config.parent.mkdir(parents=True)
    config.write_text("name: fundus\n")
    return kit


@pytest.fixture(scope="module")
def made(clinic: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the archive that the command writes."""
    output = tmp_path_factory.mktemp("made") / "fundus.zip"
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert run(monkeypatch, "evidence", "fundus-1", "--kit", clinic, "-o", output) == 0
    return output


@pytest.fixture
def root(hub: Path) -> str:
    """Return the fingerprint of the project's root, as the hub tells it."""
    return fingerprints(load_crt(hub / "other/startup/rootCA.pem"))[0]


def content(archive: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(archive) as opened:
        return {name: opened.read(name) for name in opened.namelist()}


def write(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, body in files.items():
            archive.writestr(name, body)
    return path


def test_archive_contents_have_no_key(made: Path, clinic: Path, root: str) -> None:
    files = content(made)
    assert files.keys() == {
        "README.md", "what-left.md", "audit-1.jsonl", "ledger.sqlite", "job.yaml", "versions.json", "packages.txt",
        "policy-site.yaml", "policy-privacy.json", "policy-authorization.json", "policy-resources.json",
        "kit.crt", "rootCA.pem", MANIFEST, SIGNATURE,
    }  # fmt: skip
    assert files["audit-1.jsonl"] == next(clinic.rglob(FILE)).read_bytes()
    assert files["job.yaml"] == b"name: fundus\n"
    assert b"nvflare==2.9.0\n" in files["packages.txt"]
    assert b"# What left clinic: fundus-1, run r1" in files["what-left.md"]
    assert b"record and ledger are whole" in files["README.md"]
    secret = (clinic / "startup/client.key").read_bytes().splitlines()[1]
    assert not [name for name, body in files.items() if secret in body or b"PRIVATE KEY" in body]
    found = verify(made, root)
    assert (found["site"], found["experiment"], found["messages"], found["rows"]) == ("clinic", "fundus-1", 2, 1)
    assert found["record"] is found["ledger"] is None
    assert made.stat().st_mode & 0o077 == 0


def other_manifest(files: dict[str, bytes], hub: Path) -> None:
    files["job.yaml"] = b"name: harmless\n"
    manifest = json.loads(files[MANIFEST])
    manifest["files"]["job.yaml"] = hashlib.sha256(files["job.yaml"]).hexdigest()
    files[MANIFEST] = json.dumps(manifest).encode()


def signed_by(kit: str) -> Callable[[dict[str, bytes], Path], None]:
    def sign(files: dict[str, bytes], hub: Path) -> None:
        (key,) = (hub / kit / "startup").glob("*.key")
        other_manifest(files, hub)
        files["kit.crt"] = key.with_suffix(".crt").read_bytes()
        manifest = json.loads(files[MANIFEST])
        manifest["files"]["kit.crt"] = hashlib.sha256(files["kit.crt"]).hexdigest()
        files[MANIFEST] = json.dumps(manifest).encode()
        files[SIGNATURE] = sign_content(files[MANIFEST], load_private_key_file(str(key)), return_str=False)

    return sign


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda files, hub: files.update({"audit-1.jsonl": b"hallo"}), r"audit-1\.jsonl: is not as it was signed"),
        (lambda files, hub: files.update({"job.yaml": files["README.md"], "README.md": files["job.yaml"]}), "is not as it was"),
        (lambda files, hub: files.update({"approval.pdf": b"yes"}), r"approval\.pdf: is not as it was signed"),
        (lambda files, hub: files.pop("ledger.sqlite"), r"ledger\.sqlite: is not as it was signed"),
        (other_manifest, r"manifest\.json is not as it was signed"),
        (lambda files, hub: files.update({SIGNATURE: b"\0" * 256}), r"manifest\.json is not as it was signed"),
        (signed_by("other"), "says it is clinic's, and other has signed it"),
        (signed_by("localhost"), "says it is clinic's, and localhost has signed it"),
        (signed_by("a@hub.example"), "says it is clinic's, and a@hub.example has signed it"),
    ],
)
def test_every_change_is_detected(
    change: Callable[..., None], says: str, made: Path, hub: Path, root: str, tmp_path: Path
) -> None:
    files = content(made)
    change(files, hub)
    with pytest.raises(ConsiliumError, match=says):
        verify(write(tmp_path / "changed.zip", files), root)


def test_other_project_of_equal_names_is_refused(made: Path, hub: Path, tmp_path: Path, root: str) -> None:
    """A forger with a root of his own signs an archive that is right in itself; only the root tells."""
    forged = provision(hub.parents[2] / "sites.yml", tmp_path / "kits")
    files = content(made)
    for name, path in (("kit.crt", "client.crt"), ("rootCA.pem", "rootCA.pem")):
        files[name] = (forged / "clinic/startup" / path).read_bytes()
    manifest = json.loads(files[MANIFEST])
    manifest["files"] |= {name: hashlib.sha256(files[name]).hexdigest() for name in ("kit.crt", "rootCA.pem")}
    manifest["made"] += 60
    files[MANIFEST] = json.dumps(manifest).encode()
    key = load_private_key_file(str(forged / "clinic/startup/client.key"))
    files[SIGNATURE] = sign_content(files[MANIFEST], key, return_str=False)
    archive = write(tmp_path / "forged.zip", files)
    assert verify(archive, next(iter(fingerprints(load_crt(forged / "clinic/startup/rootCA.pem")))))["site"] == "clinic"
    with pytest.raises(ConsiliumError, match="its root is another one"):
        verify(archive, root)
    files["rootCA.pem"] = content(made)["rootCA.pem"]
    with pytest.raises(ConsiliumError, match="not signed by its root"):
        verify(write(tmp_path / "mixed.zip", files), root)


@pytest.mark.parametrize("name", ["../evil", "/etc/evil", "a/b", "..", ".hidden", "a\\b", "x" * 200])
def test_paths_in_archives_are_refused(name: str, made: Path, root: str, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    archive = write(place / "bad.zip", {**content(made), name: b"evil"})
    with pytest.raises(ConfigError, match=r"twice.*path"):
        verify(archive, root)
    assert [p.name for p in tmp_path.rglob("*")] == ["place", "bad.zip"]


def told(root: str) -> dict[str, str]:
    """Return the forms in which nvflare, openssl and people write the fingerprint of 64 hex digits `root`."""
    colons = ":".join(root[i : i + 2] for i in range(0, 64, 2)).upper()
    return {
        "nvflare package": f"SHA256:{colons}", "openssl": f"sha256 Fingerprint={colons}",
        "openssl 1": f"SHA256 Fingerprint={colons}",
        "by telephone": " ".join(root[i : i + 4] for i in range(0, 64, 4)), "prefix and digits": f"sha256:{root}",
        "digits": root.upper(),
    }  # fmt: skip


def test_fingerprint_formats(
    made: Path, root: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for form, words in told(root).items():
        assert run(monkeypatch, "evidence", made, "--verify", "--fingerprint", words) == 0, (form, capsys.readouterr().err)


def test_wrong_fingerprint_does_not_call_a_genuine_archive_forged(
    made: Path, hub: Path, root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mistyped fingerprint and an archive of another project look alike; an archive that was changed does not."""
    for words in told("ab" * 32).values():
        assert run(monkeypatch, "evidence", made, "--verify", "--fingerprint", words) == 1
        said = " ".join(capsys.readouterr().err.split())
        assert "is intact and signed, but its root is another one than --fingerprint or --kit names" in said
        assert "ask the hub for its root's fingerprint again" in said
        assert "forged" not in said
    files = content(made)
    signed_by("other")(files, hub)
    changed = write(tmp_path / "changed.zip", files)
    for words in (root, "ab" * 32):
        assert run(monkeypatch, "evidence", changed, "--verify", "--fingerprint", words) == 1
        assert "the archive is forged" in " ".join(capsys.readouterr().err.split())


def test_archives_from_before_a_renewal_verify_by_a_kit_from_before(
    made: Path, hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a renewal of the root's certificate, and after one by another key."""
    copied = Path(shutil.copytree(hub.parents[2], tmp_path / "hub"))
    before = copied / hub.relative_to(hub.parents[2]) / "other"
    signed_under = load_crt(before / "startup/rootCA.pem")
    for root, fits in ((KEEP, True), (NEW_ROOT, False)):
        new = renew(copied / "sites.yml", copied / "kits", root=root) / "other"
        now = load_crt(new / "startup/rootCA.pem")
        assert run(monkeypatch, "evidence", made, "--verify", "--fingerprint", fingerprints(now)[0]) == 1
        said = " ".join(capsys.readouterr().err.split())
        assert f"({fingerprints(signed_under)[0]}, valid since {signed_under.not_valid_before_utc:%Y-%m-%d})" in said
        assert "If the root was renewed later, give --kit with a kit from before (at the hub: kits/PROJECT/prod_NN/" in said
        assert run(monkeypatch, "evidence", made, "--verify", "--kit", before) == 0
        assert (run(monkeypatch, "evidence", made, "--verify", "--kit", new) == 0) is fits


@pytest.mark.parametrize("words", ["", "SHA256:", "ab", "MD5:" + "ab:" * 15 + "ab", "ab" * 20, "zz" * 32, "SHA256:" + "A" * 42])
def test_invalid_fingerprint_is_a_usage_error(
    words: str, made: Path, root: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "evidence", made, "--verify", "--fingerprint", words) == 2
    said = capsys.readouterr().err
    assert "--fingerprint" in said
    assert "forged" not in said
    assert len(said.strip().splitlines()) == 1


def test_malformed_archives_are_refused(made: Path, root: str, tmp_path: Path) -> None:
    twice = Path(shutil.copy(made, tmp_path / "twice.zip"))
    with zipfile.ZipFile(twice, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr("job.yaml", "name: other")
    with pytest.raises(ConfigError, match="a file twice"):
        verify(twice, root)
    with pytest.raises(ConfigError, match="over 200 files"):
        verify(write(tmp_path / "many.zip", {f"f{i}": b"" for i in range(201)}), root)
    (tmp_path / "text.zip").write_text("no archive")
    with pytest.raises(ConfigError, match="is not a readable archive"):
        verify(tmp_path / "text.zip", root)
    with pytest.raises(ConfigError, match=r"has no manifest\.json"):
        verify(write(tmp_path / "empty.zip", {}), root)


@pytest.mark.parametrize("text", ["{", "[]", "null", "[" * 100_000, '{"format": 1}', '{"format": 1, "files": {"a": 1}}'])
def test_malformed_manifest_is_one_line(text: str, made: Path, root: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        verify(write(tmp_path / "odd.zip", content(made) | {MANIFEST: text.encode()}), root)


def test_altered_record_is_signed_as_altered(
    clinic: Path, root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kit = Path(shutil.copytree(clinic, tmp_path / "clinic", symlinks=True))
    record = next(kit.rglob(FILE))
    record.write_text(record.read_text().replace('"hello"', '"hallo"'))
    assert run(monkeypatch, "evidence", "fundus-1", "--kit", kit, "-o", tmp_path / "e.zip") == 1
    assert "record ALTERED: audit-1.jsonl, line 2" in capsys.readouterr().out
    assert b"ALTERED" in content(tmp_path / "e.zip")["README.md"]
    assert run(monkeypatch, "evidence", tmp_path / "e.zip", "--verify", "--fingerprint", root) == 1
    assert run(monkeypatch, "evidence", "fundus-1", "--kit", kit, "-o", tmp_path / "e.zip") == 2
    assert "evidence is never replaced" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("ledger.sqlite", b"no ledger" * 200, "the privacy ledger cannot be read (file is not a database); restore it"),
        (FILE, b"\xff\n", "cannot be read as a record (it is no text); restore it"),
        (FILE, b'{"time": 1.0, "kind": "update", "previous": "", "scalars": [1]}\n', "a message in it has not the form"),
    ],
)
def test_damaged_ledger_or_record_is_one_line(
    file: str,
    content: bytes,
    says: str,
    clinic: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    kit = Path(shutil.copytree(clinic, tmp_path / "clinic", symlinks=True))
    (path,) = (kit / STATE).rglob(file)
    path.write_bytes(content)
    assert run(monkeypatch, "evidence", "fundus-1", "--kit", kit, "-o", tmp_path / "e.zip") == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"{path}: {says}")
    assert not (tmp_path / "e.zip").exists()


def test_a_kit_whose_certificate_has_ended_makes_no_evidence(
    clinic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The archive was written, and no verifier would have accepted it."""
    set_clock(monkeypatch, load_crt(clinic / "startup/client.crt").not_valid_after_utc + timedelta(minutes=5))
    assert run(monkeypatch, "evidence", "fundus-1", "--kit", clinic, "-o", tmp_path / "e.zip") == 2
    assert "set the clock, or ask the hub for a renewed kit" in capsys.readouterr().err
    assert not (tmp_path / "e.zip").exists()


def test_verify_needs_an_independent_root(
    made: Path, hub: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "evidence", made, "--verify") == 2
    assert "anybody can sign with a root of his own" in capsys.readouterr().err
    assert run(monkeypatch, "evidence", made, "--verify", "--kit", hub / "a@hub.example") == 0
    assert "the signature and the project's root are right" in capsys.readouterr().out
    assert run(monkeypatch, "evidence", made, "--verify", "--kit", hub / "a@hub.example", "--format", "json") == 0
    assert json.loads(capsys.readouterr().out)["intact"] is True


def test_unknown_run_is_one_line(clinic: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "evidence", "fundus-2", "--kit", clinic) == 2
    assert capsys.readouterr().err.endswith("no such run here; there: fundus-1\n")  # and not the folder's lock
    assert run(monkeypatch, "evidence", "../fundus-1", "--kit", clinic) == 2


def test_other_keys_and_compressions_are_refused(made: Path, root: str, tmp_path: Path) -> None:
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "clinic")])
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1).not_valid_before(now)
    odd = builder.not_valid_after(now + timedelta(1)).sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)
    for where in ("kit.crt", "rootCA.pem"):
        with pytest.raises(ConfigError, match="its key"):
            verify(write(tmp_path / "odd.zip", content(made) | {where: odd}), root)
        with pytest.raises(ConfigError, match="cannot be read"):
            verify(write(tmp_path / "odd.zip", content(made) | {where: b"none"}), root)
    with zipfile.ZipFile(tmp_path / "lzma.zip", "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr(MANIFEST, b"{}")
    with pytest.raises(ConfigError, match="packed in another way"):
        verify(tmp_path / "lzma.zip", root)
    torn = bytearray(made.read_bytes())
    torn[60:200] = bytes(140)
    (tmp_path / "torn.zip").write_bytes(torn)
    with pytest.raises(ConfigError, match="is not a readable archive"):
        verify(tmp_path / "torn.zip", root)


def test_unpacked_bytes_are_bounded(made: Path, root: str, tmp_path: Path) -> None:
    bomb = write(tmp_path / "bomb.zip", content(made) | {"job.yaml": b"\0" * 2**22})
    data, size = bytearray(bomb.read_bytes()), (2**22).to_bytes(4, "little")
    while (at := data.find(size)) >= 0:
        data[at : at + 4] = (10).to_bytes(4, "little")
    bomb.write_bytes(data)
    tracemalloc.start()
    with pytest.raises(ConfigError, match="is not a readable archive"):
        verify(bomb, root)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**21


def test_attack_results_of_this_run_only(
    clinic: Path, root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, words = tmp_path / "attack.json", ("evidence", "fundus-1", "--kit", clinic, "-o", tmp_path / "a.zip", "--attack")
    for content in ("{", "[]", '{"model": "/runs/fundus-2/adapters", "attacks": [{"auc": 0.5}]}', '{"model": "fundus-1"}'):
        path.write_text(content)
        assert run(monkeypatch, *words, path) != 0
        assert f"--attack: {path}: " in capsys.readouterr().err
        assert not (tmp_path / "a.zip").exists()
    path.write_text('{"model": "/srv/runs/fundus-1/sites/clinic/adapters", "attacks": [{"auc": 0.53, "epsilon": 0.1}]}')
    assert run(monkeypatch, "evidence", "a.zip", "--verify", "--kit", clinic, "--attack", path) != 0
    assert run(monkeypatch, *words, path) == 0
    assert "attack-1.json" in verify(tmp_path / "a.zip", root)["files"]
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        assert archive.read("attack-1.json") == path.read_bytes()


@pytest.mark.parametrize("cut", [1, 0])
def test_lost_rows_need_acceptance(cut: int, tmp_path: Path) -> None:
    """Rows cut off the end leave a chain that is right in itself, and so does a file that is gone."""
    ledger, record = Ledger(tmp_path / "ledger.sqlite"), AuditLog(tmp_path / FILE)
    for round in range(2):
        ledger.charge_once(replace(ROW, round=round), {})
        record.add({"kind": "update", "round": round, "phase": 0, "ledger": ledger.seal()})
    whole = {"audit-1.jsonl": (tmp_path / FILE).read_bytes(), LEDGER: ledger.path.read_bytes()}
    assert verify_chains(whole) == {"messages": 2, "record": None, "rows": 2, "ledger": None}
    seals = ledger.seals()
    with sqlite3.connect(ledger.path) as db:
        db.execute("DELETE FROM releases WHERE rowid > ?", (cut,))
    found = {"audit-1.jsonl": whole["audit-1.jsonl"]} | ({LEDGER: ledger.path.read_bytes()} if cut else {})
    assert verify_chains(found)["ledger"].startswith("lacks rows: a record names the seal ")
    assert verify_chains(found | {ACCEPTED: json.dumps(seals).encode()})["ledger"] is None


def test_void_claims_come_first(clinic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and messages of versions whose noise can be taken off, and noise of a seed, which a record says of itself."""
    kit = Path(shutil.copytree(clinic, tmp_path / "clinic", symlinks=True))
    ledger = kit / STATE / "ledger.sqlite"
    ledger.unlink()
    old_ledger(ledger, replace(ROW, unit="record", job="retina", sample_rate=0.5, count=2), ROW)
    private = {"unit": "record", "adjacency": "zero-out", "trust": "local", "delta": 1e-5, "clip": 1.0, "noise_multiplier": 4.0}
    spent = {"spend": {"noise_multiplier": 4.0, "sample_rate": 0.5, "count": 2}}
    record = AuditLog(next(kit.rglob(FILE)))
    for phase, said in enumerate(({}, {"mechanism": DISCRETE}, {"mechanism": DISCRETE, "seeded": True})):
        line = {"site": "clinic", "run": "r1", "kind": "update", "round": 1, "phase": phase, "tensors": {}, "metrics": {}}
        record.add(line | {"privacy": private | said | spent})
    assert run(monkeypatch, "evidence", "fundus-1", "--kit", kit, "-o", tmp_path / "one.zip") == 0
    files = content(tmp_path / "one.zip")
    head = files["README.md"].decode().partition("What is claimed")[0]
    assert "NOT PRIVATE: the noise of 1 messages came from a seed" in head
    assert "1 messages are void" in head
    assert "1 rows of the ledger (jobs retina) are void" in head
    for said in ("NOT PRIVATE: the noise of 1 messages", "1 messages are void"):
        assert said in files["what-left.md"].decode()
