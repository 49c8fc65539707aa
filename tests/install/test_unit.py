"""The unit of a kit: what systemd makes of it, and of the page's settings for other machines."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.pages.reading import ROOT, blocks

ANALYZE = shutil.which("systemd-analyze")
UNIT = (ROOT / "provisioning/consilium@.service").read_text()
(EDIT,) = (block.text for block in blocks("provisioning/installation.md") if block.language == "ini")
(UNLOCK,) = (block.text for block in blocks("provisioning/administrator.md") if block.language == "ini")
CONSILIUM = "/opt/consilium/bin/consilium"


def test_unit_starts_the_kits_script_and_writes_its_state() -> None:
    """The words are those that tests/deployment starts every participant with, and a container."""
    lines = UNIT.splitlines()
    assert "ExecStart=/bin/bash /srv/consilium/%i/startup/sub_start.sh --once" in lines
    assert {"User=consilium", "ProtectSystem=strict", "ReadWritePaths=/srv/consilium/%i", "NoNewPrivileges=yes"} <= set(lines)
    assert "RemoveIPC=yes" not in lines  # at a stop it deletes the user's files in /dev/shm, where `unlock` puts the keys


@pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize(("edit", "most"), [("", 20), (EDIT, 30), (UNLOCK, 20)], ids=["unit", "edited", "unlock"])
def test_systemd_accepts_the_unit_and_rates_it_closed(edit: str, most: int, tmp_path: Path) -> None:
    path = tmp_path / "consilium@hospital-a.service"
    path.write_text(UNIT.replace("=consilium\n", "=daemon\n"))  # a user that is there
    if edit:
        (tmp_path / f"{path.name}.d").mkdir()
        (tmp_path / f"{path.name}.d" / "override.conf").write_text(
            edit.replace(CONSILIUM, "/bin/true")
        )  # a command that is there
    done = subprocess.run([str(ANALYZE), "verify", "--man=no", path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    words = ["security", "--offline=true", f"--threshold={most}", path]  # tenths of the exposure
    assert subprocess.run([str(ANALYZE), *words], capture_output=True, check=False).returncode == 0


def test_the_page_names_the_paths_and_the_user_of_the_unit() -> None:
    """The lines that unlock a kit, and the commands for root beside them."""
    (kit,) = re.findall(r"^ReadWritePaths=(\S+)$", UNIT, re.M)
    (user,) = re.findall(r"^User=(\S+)$", UNIT, re.M)
    assert f"Environment=PATH={Path(CONSILIUM).parent}:" in UNIT
    credential = "/etc/credstore.encrypted/consilium-%i"
    assert UNLOCK.splitlines() == [
        "[Service]",
        f"LoadCredentialEncrypted=passphrase:{credential}",
        f"ExecStartPre={CONSILIUM} unlock {kit} --passphrase-file %d/passphrase",
        f"ExecStopPost=-{CONSILIUM} lock {kit}",
    ]
    assert "ExecStartPre=" not in UNIT  # systemd 252 gives credentials to the first of these commands only
    commands = "".join(block.text for block in blocks("provisioning/administrator.md") if block.language == "bash")
    assert f"runuser -u {user} -- {CONSILIUM} unlock {kit}\n".replace("%i", "hospital-a") in commands
    assert f"--name=passphrase - {credential}\n".replace("%i", "hospital-a") in commands
