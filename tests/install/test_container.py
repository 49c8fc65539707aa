"""The container's image, built from a wheelhouse by buildah on a minimal Debian: what it runs as, holds and refuses."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ("buildah", "debootstrap")
ISOLATED = ("--isolation", "chroot")

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(os.geteuid() != 0 or not all(map(shutil.which, TOOLS)), reason=f"needs root, {' and '.join(TOOLS)}"),
]


def said(*words: str | Path, fails: bool = False) -> str:
    """Run a command and return its output; one that `fails` must fail."""
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=3000, check=False)
    assert (done.returncode != 0) == fails, done.stderr[-2000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the name of an image with Debian's Python alone."""
    root = tmp_path_factory.mktemp("debian") / "root"
    said("debootstrap", "--variant=minbase", "--include=python3,python3-venv,ca-certificates", "bookworm", root)
    held = said("buildah", "from", "scratch").strip()
    said("buildah", "copy", "-q", held, root, "/")
    said("buildah", "commit", "-q", held, "consilium-base")
    return "localhost/consilium-base"


@pytest.fixture(scope="module")
def wheelhouse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a wheelhouse of this tree and of all that requirements.txt pins."""
    folder = tmp_path_factory.mktemp("wheelhouse")
    pip = (sys.executable, "-m", "pip", "-q", "wheel", "-w", folder / "wheels")
    said(*pip, "-r", ROOT / "requirements.txt")
    said(*pip, "--no-deps", ROOT)
    (folder / "requirements.lock").write_bytes((ROOT / "requirements.txt").read_bytes())
    files = ("requirements.lock", *(f"wheels/{path.name}" for path in sorted((folder / "wheels").iterdir())))
    listed = subprocess.run(["sha256sum", *files], cwd=folder, capture_output=True, text=True, check=True)
    (folder / "SHA256SUMS").write_text(listed.stdout)
    return folder


def build(base: str, wheelhouse: Path, *, fails: bool = False) -> str:
    how = ("--format", "docker", "-f", ROOT / "provisioning/container/Dockerfile", "--build-arg", f"PYTHON_IMAGE={base}")
    return said("buildah", "bud", *ISOLATED, *how, "-t", "consilium-tested", wheelhouse, fails=fails)


def test_the_image_runs_as_nobody_and_keeps_its_health_check(base: str, wheelhouse: Path) -> None:
    build(base, wheelhouse)
    config = json.loads(said("buildah", "inspect", "--type", "image", "consilium-tested"))["Docker"]["config"]
    assert config["Healthcheck"]["Test"] == ["CMD", "consilium", "doctor", "/kit"]
    assert (config["User"], config["Entrypoint"][:2]) == ("10001:10001", ["/bin/bash", "/kit/startup/sub_start.sh"])
    held = said("buildah", "from", "consilium-tested").strip()
    run = ("buildah", "run", *ISOLATED, held, "--")
    try:
        assert "simulate" in said(*run, "consilium", "--help")
        assert "startup/ and local/" in said(*run, "consilium", "doctor", "/kit", fails=True)  # no kit is mounted
        assert said(*run, "id", "-u").strip() == "10001"
        for place in ("/empty", "/opt/consilium", "/usr"):
            said(*run, "touch", f"{place}/mine", fails=True)
        simulated = (
            "consilium init /tmp/tried && cd /tmp/tried && consilium simulate jobs/quickstart_cells --set training.rounds=1"
        )
        assert "mean" in said(*run, "sh", "-c", simulated)
    finally:
        said("buildah", "rm", held)


def test_a_changed_wheel_is_not_built(base: str, wheelhouse: Path, tmp_path: Path) -> None:
    shutil.copytree(wheelhouse, tmp_path / "sent", copy_function=os.link)
    changed = next((tmp_path / "sent/wheels").glob("consilium_flare*"))
    content = changed.read_bytes()
    changed.unlink()
    changed.write_bytes(content + b"\0")
    assert changed.name in build(base, tmp_path / "sent", fails=True)
