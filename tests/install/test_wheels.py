"""Programs that are not ours check a wheelhouse: sha256sum, openssl, pip. What was changed on its way is not installed."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from consilium.core.errors import ConfigError
from consilium.flare.kit.install import wheels
from consilium.flare.kit.install.wheels import INSTALL, LOCK, SBOM, SIGNATURE, SUMS, WHEELS, Target, describe, make
from tests.conftest import run
from tests.install.houses import HERE, house, write_wheel


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder as `nvflare cert init` leaves it: the root's key, and its public half for openssl."""
    folder, key = tmp_path_factory.mktemp("ca"), rsa.generate_private_key(public_exponent=65537, key_size=2048)
    (folder / "rootCA.key").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption()))
    (folder / "root.pub").write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return folder


@pytest.fixture
def made(tmp_path: Path, state: Path) -> Path:
    return house(tmp_path / "a house", state)


def signed(folder: Path, state: Path) -> bool:
    """Ask openssl, as the page for administrators says it."""
    words = ["openssl", "dgst", "-sha256", "-sigopt", "rsa_padding_mode:pss", "-sigopt", "rsa_pss_saltlen:-2"]
    words += ["-verify", str(state / "root.pub"), "-signature", SIGNATURE, SUMS]
    return subprocess.run(words, cwd=folder, capture_output=True, check=False).returncode == 0


def install(folder: Path, target: Path, **environment: str) -> tuple[int, str]:
    """Run install.sh, and return its code and what it says."""
    words, given = [str(folder / INSTALL), str(target)], os.environ | environment
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=given)
    return done.returncode, done.stdout + done.stderr


def refusal(folder: Path, target: Path, **environment: str) -> str:
    """Return the one line with which install.sh refuses."""
    code, said = install(folder, target, **environment)
    assert code == 1
    assert said.startswith("install.sh: ")
    assert said.count("\n") == 1
    return said.removeprefix("install.sh: ").strip()


def test_root_key_signs_all_hashes(made: Path, state: Path) -> None:
    assert signed(made, state)
    listed = {line.split("  ")[1] for line in (made / SUMS).read_text().splitlines()}
    present = {path.relative_to(made).as_posix() for path in made.rglob("*") if path.is_file()}
    assert listed == present - {SUMS, SIGNATURE}
    assert subprocess.run(["sha256sum", "--status", "-c", SUMS], cwd=made, check=False).returncode == 0
    (made / SUMS).write_text((made / SUMS).read_text().replace("a", "b", 1))
    assert not signed(made, state)


@pytest.mark.parametrize("kept", ["[]", '{"root_pri_key": 7}', "EC"])
def test_invalid_root_key_is_one_line(kept: str, tmp_path: Path) -> None:
    if kept == "EC":
        own = ec.generate_private_key(ec.SECP256R1())
        (tmp_path / "rootCA.key").write_bytes(own.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    else:
        (tmp_path / "cert.json").write_text(kept)
    with pytest.raises(ConfigError, match="has no root key"):
        wheels.root_key(tmp_path)


def test_wheel_with_binary_metadata_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "consilium-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("consilium-1.0.dist-info/METADATA", b"\xff\xfe")
    with pytest.raises(ConfigError, match="is no wheel of consilium"):
        make(wheel, tmp_path / "out", Target("linux-x86_64", "3.11"), (), (), None)


def test_lock_and_bill_have_equal_hashes(made: Path) -> None:
    sums = {path.name.split("-")[0]: hashlib.sha256(path.read_bytes()).hexdigest() for path in (made / WHEELS).iterdir()}
    assert (made / LOCK).read_text().split() == [
        "consilium==9.9", f"--hash=sha256:{sums['consilium']}", "tinypart==1.0", f"--hash=sha256:{sums['tinypart']}"
    ]  # fmt: skip
    bill = json.loads((made / SBOM).read_text())
    (part,) = bill["components"]
    assert (part["name"], part["version"], part["purl"]) == ("tinypart", "1.0", "pkg:pypi/tinypart@1.0")
    assert part["hashes"] == [{"alg": "SHA-256", "content": sums["tinypart"]}]
    assert bill["metadata"]["component"]["name"] == "consilium"
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str((made / SBOM).read_text()) is None  # by CycloneDX' own schema


def test_install_refuses_changed_files_and_other_machines(made: Path, tmp_path: Path) -> None:
    target = tmp_path / "new"
    (wheel,) = (made / WHEELS).glob("tinypart*")
    kept = wheel.read_bytes()
    for spoil, told in ((lambda: wheel.write_bytes(kept + b"x"), "FAILED"), (wheel.unlink, "FAILED open or read")):
        spoil()
        assert (
            refusal(made, target)
            == f"wheels/{wheel.name}: {told}: not as the hub made it; copy the folder again, or ask the hub"
        )
    wheel.write_bytes(kept)
    (made / SUMS).write_text((made / SUMS).read_text() + "a line that says nothing\n")
    assert refusal(made, target).startswith("SHA256SUMS: damaged or missing: not as the hub made it")
    (made / SUMS).unlink()
    assert refusal(made, target).startswith("SHA256SUMS: damaged or missing: not as the hub made it")
    assert refusal(made, tmp_path).startswith(f"{tmp_path}: exists; give a new folder")
    assert refusal(made, target, PYTHON="/no/python").startswith(
        "/no/python: cannot be run; set PYTHON to the path of a Python 3"
    )
    describe(made, replace(HERE, python="3.99"))
    assert re.match(r"these wheels are for linux \w+ 3\.99, python3 is linux .*; ask the hub", refusal(made, target))
    assert not target.exists()


def test_install_script_is_plain_sh(made: Path) -> None:
    assert subprocess.run(["dash" if shutil.which("dash") else "sh", "-n", made / INSTALL], check=False).returncode == 0
    assert "@" not in (made / INSTALL).read_text()


@pytest.mark.parametrize(
    ("target", "field"),
    [
        (Target("windows-x86_64", "3.11"), "--platform: 'windows-x86_64'"),
        (Target("linux-x86_64", "2.7"), "--python: '2.7'"),
        (Target("linux-x86_64", "3.11", "cpu --pre"), "--accelerator: 'cpu --pre'"),
    ],
)
def test_unknown_targets_are_refused(target: Target, field: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(field)):
        make(tmp_path / "x.whl", tmp_path / "out", target, (), (), None)


def test_wrong_arguments_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel, out = write_wheel(tmp_path, "consilium", "9.9"), tmp_path / "out"
    (tmp_path / "consilium-1.0-py3-none-any.whl").write_text("no archive")
    for words, told in (
        ([tmp_path / "none.whl", "-o", out], "none.whl: is no wheel of consilium"),
        ([tmp_path / "consilium-1.0-py3-none-any.whl", "-o", out], "is no wheel"),
        ([write_wheel(tmp_path, "tinypart", "1.0"), "-o", out], "is no wheel of consilium"),
        ([wheel, "-o", out, "--extra", "dicmo"], "--extra: 'dicmo': the wheel has no such extra"),
        ([wheel, "-o", out, "--sign", tmp_path], "has no root key"),
        ([wheel, "-o", tmp_path], "exists; give a new folder"),
    ):
        assert run(monkeypatch, "wheels", *words) == 2
        assert told in capsys.readouterr().err.replace("\n", " ")
    assert not out.exists()


def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIP_NO_INDEX", "UV_NO_INDEX", "UV_OFFLINE"):
        monkeypatch.setenv(name, "1")


@pytest.mark.slow  # uv and pip
def test_wheels_are_for_the_target_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    offline(monkeypatch)
    (tmp_path / "links").mkdir()
    needs = []
    for machine in wheels.PLATFORMS.values():
        write_wheel(tmp_path / "links", f"for_{machine}", "1.0")
        needs.append(f'for_{machine}==1.0; platform_machine == "{machine}"')
    (other,) = wheels.PLATFORMS.keys() - {HERE.platform}
    wheel, words = write_wheel(tmp_path, "consilium", "9.9", *needs), ["--links", tmp_path / "links", "--platform", other]
    assert run(monkeypatch, "wheels", wheel, "-o", tmp_path / "out", *words) == 0
    assert re.findall(r"^(\S+)==", (tmp_path / "out" / LOCK).read_text(), re.M) == [
        "consilium",
        f"for_{wheels.PLATFORMS[other]}",
    ]
    write_wheel(tmp_path, "consilium", "9.9", "nowhere==1.0")
    capsys.readouterr()
    assert run(monkeypatch, "wheels", wheel, "-o", tmp_path / "second", *words) == 1
    told = capsys.readouterr().err
    assert "what the package needs could not be resolved: uv:" in told
    assert "nowhere" in told
    assert told.count("\n") == 1
    assert not (tmp_path / "second").exists()


@pytest.mark.slow  # virtual environments
def test_offline_install_takes_signed_files_only(tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offline(monkeypatch)
    (tmp_path / "links").mkdir()
    write_wheel(tmp_path / "links", "tinypart", "1.0")
    wheel, folder = write_wheel(tmp_path, "consilium", "9.9", "tinypart==1.0"), tmp_path / "a house"
    words = [wheel, "-o", folder, "--platform", HERE.platform, "--links", tmp_path / "links", "--sign", state]
    assert run(monkeypatch, "wheels", *words) == 0
    assert signed(folder, state)
    write_wheel(folder / WHEELS, "tinypart", "1.0.post1")  # a newer one laid beside them
    assert install(folder, tmp_path / "an environment") == (0, "9.9\n")
    (site,) = (tmp_path / "an environment").glob("lib/*/site-packages")
    assert (site / "tinypart-1.0.dist-info").is_dir()
    hub = folder / WHEELS / "tinypart-1.0-py3-none-any.whl"  # one who may write the folder changes wheel and hashes alike
    hub.unlink()
    write_wheel(hub.parent, "tinypart", "1.0", code="def main():\n    raise SystemExit\n")
    lines = [line for line in (folder / SUMS).read_text().splitlines() if hub.name not in line]
    lines.append(f"{hashlib.sha256(hub.read_bytes()).hexdigest()}  wheels/{hub.name}")
    (folder / SUMS).write_text("\n".join([*lines, ""]))
    code, said = install(folder, tmp_path / "second")
    assert code == 1
    assert "incomplete, see above; remove it" in said
    assert not list((tmp_path / "second").glob("lib/*/site-packages/tinypart*"))
    assert not signed(folder, state)
