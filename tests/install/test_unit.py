"""The unit of a kit: what systemd makes of it, and of the page's settings for other machines."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.pages.reading import ROOT, blocks

ANALYZE = shutil.which("systemd-analyze")
UNIT = (ROOT / "provisioning/consilium@.service").read_text()
(EDIT,) = (block.text for block in blocks("provisioning/installation.md") if block.language == "ini")


def test_unit_starts_the_kits_script_and_writes_its_state() -> None:
    """The words are those that tests/deployment starts every participant with, and a container."""
    lines = UNIT.splitlines()
    assert "ExecStart=/bin/bash /srv/consilium/%i/startup/sub_start.sh --once" in lines
    assert {"User=consilium", "ProtectSystem=strict", "ReadWritePaths=/srv/consilium/%i", "NoNewPrivileges=yes"} <= set(lines)
    assert "RemoveIPC=yes" not in lines  # at a stop it deletes the user's files in /dev/shm, where `unlock` puts the keys


@pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize(("edit", "most"), [("", 20), (EDIT, 30)], ids=["unit", "edited"])
def test_systemd_accepts_the_unit_and_rates_it_closed(edit: str, most: int, tmp_path: Path) -> None:
    path = tmp_path / "consilium@hospital-a.service"
    path.write_text(UNIT.replace("=consilium\n", "=daemon\n"))  # a user that is there
    if edit:
        (tmp_path / f"{path.name}.d").mkdir()
        (tmp_path / f"{path.name}.d" / "override.conf").write_text(edit)
    done = subprocess.run([str(ANALYZE), "verify", "--man=no", path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    words = ["security", "--offline=true", f"--threshold={most}", path]  # tenths of the exposure
    assert subprocess.run([str(ANALYZE), *words], capture_output=True, check=False).returncode == 0
