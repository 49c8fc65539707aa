"""The pages' commands that need running kits, typed line by line in a federation of `consilium poc`."""

import hashlib
import json
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from tests.conftest import run, small_config
from tests.deployment.federation import Federation
from tests.deployment.test_poc import poc
from tests.pages.reading import blocks

pytestmark = pytest.mark.slow
SITES = ("site-1", "site-2", "site-3")
LEADS = "kits/NAME/prod_00/lead@hub.example"
Lines = Callable[[str, str], Iterator[list[str]]]


@pytest.fixture
def kits(tmp_path: Path) -> Iterator[Path]:
    """The folder of the kits of a server and three sites that run; one site keeps runs for a year."""
    environment = Federation.scratch_environment(tmp_path)
    words = poc(tmp_path, "--sites", len(SITES), "--keep")
    try:
        subprocess.run(words, env=environment, check=True, capture_output=True, timeout=400)
        kits = tmp_path / "federation/kits/poc/prod_00"
        site = kits / "site-1/local/site.yaml"
        site.write_text(yaml.safe_dump((yaml.safe_load(site.read_text()) or {}) | {"retention_days": 365}))
        yield kits
    finally:
        subprocess.run(
            [*words[: words.index("poc") + 1], "--stop", str(tmp_path / "federation")], env=environment, check=True, timeout=120
        )


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A job with masks, so that the sites have a ledger of sums."""
    raw = small_config("fedit", rounds=2, local_steps=1).model_dump() | {"secure_aggregation": {}}
    raw["federation"]["min_sites"] = len(SITES)
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path


@pytest.fixture
def lines(kits: Path, job: Path) -> Lines:
    """Return the words of each command of a page's block, with this federation's names in place of the page's."""
    site, root = kits / "site-1", kits / "site-1/startup/rootCA.pem"
    digest = hashlib.sha256(x509.load_pem_x509_certificate(root.read_bytes()).public_bytes(Encoding.DER)).hexdigest()
    names = {
        LEADS: str(kits / "lead@hub.example"),
        "jobs/quickstart": str(job),
        "training.rounds=50": "training.rounds=2",
        "kits/consilium/prod_00/hospital-a": str(site),
        "hospital-a,hospital-b,hospital-c,hospital-d": ",".join(SITES),
        "SERVERS_KIT": str(kits / "localhost"),
        "KIT": str(site),
        "SHA256": digest,
        "JOB": str(job),
        "RUN": "fundus-1",
        "NAME": "site-1",
        "STATE": str(site / "_consilium"),
        "fundus-1.zip": str(job.with_name("fundus-1.zip")),
        "results": str(job.with_name("results")),
    }
    written = re.compile("|".join(rf"(?<![\w-]){re.escape(name)}(?![\w-])" for name in sorted(names, key=len, reverse=True)))

    def commands(page: str, begin: str) -> Iterator[list[str]]:
        (block,) = [block for block in blocks(page) if block.text.startswith(begin)]
        for line in block.text.splitlines():
            words = shlex.split(line, comments=True)
            assert words[0] == "consilium"
            yield [written.sub(lambda found: names[found[0]], word) for word in words[1:]]

    return commands


def test_commands_of_operation(
    kits: Path, lines: Lines, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def typed(page: str, begin: str, *more: str) -> str:
        """Type all commands of a block, each of which succeeds, and return what they print."""
        capsys.readouterr()
        for words in lines(page, begin):
            assert run(monkeypatch, *words, *more) == 0, (words, capsys.readouterr())
        return capsys.readouterr().out

    engineer, administrator, officer = (
        f"provisioning/{page}.md" for page in ("engineer", "administrator", "data-protection-officer")
    )
    submit, status, abort, resume, download = lines(engineer, "consilium submit")
    for words in (submit, status, download):
        assert run(monkeypatch, *words) == 0, (words, capsys.readouterr())
    long = [word.replace("fundus-1", "long").replace("rounds=2", "rounds=900") for word in submit if word != "--wait"]
    assert run(monkeypatch, *long) == 0
    for words in (abort, resume, abort):
        assert run(monkeypatch, *(word.replace("fundus-1", "long") for word in words)) == 0, (words, capsys.readouterr())
    for words in lines(engineer, "consilium status fundus-1"):
        words[words.index("--kit") + 1] = str(kits / "lead@hub.example")
        assert run(monkeypatch, *words) == 0
    assert all(name in typed(engineer, "consilium sites --kit") for name in SITES)

    assert "the server lets this site in" in typed(administrator, "consilium doctor KIT")
    assert "fundus-1" in typed(administrator, "consilium audit KIT")
    typed(administrator, "consilium approve JOB", "--yes")
    capsys.readouterr()
    assert run(monkeypatch, "approve", "--list", "--kit", kits / "site-1", "--format", "json") == 0
    (digest,) = json.loads(capsys.readouterr().out)
    for words in lines(administrator, "consilium approve --revoke"):
        assert run(monkeypatch, *(word.replace("DIGEST", digest[:12]) for word in words)) == 0
    typed("custom/consilium/data/site.md", "consilium data cache")
    assert "site-3" in typed("custom/consilium/privacy/secure-aggregation.md", "consilium privacy sums")

    typed(officer, "consilium evidence")
    typed(officer, "consilium forget")
    assert not list((kits / "site-1/_consilium").rglob("*.safetensors"))
    typed(administrator, "consilium stop KIT")
    assert run(monkeypatch, "doctor", kits / "site-1") == 0
