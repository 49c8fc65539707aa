"""FLARE's runtimes on our kits keep the kits' policies, and the container's files are shut."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from consilium import __version__
from consilium.flare.kit.kit_hardening import CLASSES, shadows_job_settings
from consilium.flare.kit.provision import provision
from tests.conftest import run

ROOT = Path(__file__).parents[2]
CONTAINER = ROOT / "provisioning" / "container"
BIN = Path(sys.executable).parent
HELM = shutil.which("helm")


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return provision(ROOT / "provisioning" / "sites.yml", tmp_path_factory.mktemp("kits"))


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


@pytest.mark.parametrize(("runtime", "launcher"), [("slurm", "SlurmJobLauncher"), ("kubernetes", "K8sJobLauncher")])
@pytest.mark.parametrize(("name", "role"), [("hospital-a", "site"), ("fl.hub.example", "server")])
def test_a_prepared_kit_keeps_its_policies(
    runtime: str, launcher: str, name: str, role: str, kits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FLARE's command alone would list its 88 classes and send the site's logs."""
    out, kit = tmp_path / "out", kits / name
    before = {path: path.read_bytes() for path in kit.rglob("*") if path.is_file()}
    assert run(monkeypatch, "prepare", kit, "--runtime", CONTAINER / f"{runtime}.yaml", "-o", out) == 0
    resources = read(out / "local/resources.json")
    assert resources["class_allow_list"] == list(CLASSES[role])
    assert resources["class_list_enforcement_mode"] == "enforce"
    assert resources.get("allow_log_streaming", False) is False
    components = {one["id"]: one["path"] for one in resources["components"]}
    assert launcher in components[f"{'slurm' if runtime == 'slurm' else 'k8s'}_launcher"]
    assert "process_launcher" not in components
    assert not (out / "local/resources.json.default").exists()
    assert shadows_job_settings(out)
    assert read(out / "comm_config.json")["grpc"] == read(kit / "comm_config.json")["grpc"]
    assert read(out / "comm_config.json")["internal"]["resources"]["connection_security"] == "mtls"
    for policy in ("authorization.json", *(("privacy.json", "site.yaml") if role == "site" else ())):
        assert (out / "local" / policy).read_bytes() == (kit / "local" / policy).read_bytes()
    assert {path: path.read_bytes() for path in kit.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("name", ["Clinic_7", "hospital-a", "fl.hub.example"])
def test_helm_chart_has_names_that_kubernetes_takes(
    name: str, kits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FLARE names a container after the kit, and Kubernetes takes no dots, underscores and capitals there."""
    kit = kits / name
    if not kit.is_dir():
        raw = yaml.safe_load((ROOT / "provisioning" / "sites.yml").read_text())
        site = {"name": name, "org": "clinic", "site": {"state": "/srv/clinic"}}
        (tmp_path / "sites.yml").write_text(yaml.safe_dump(raw | {"sites": [site]}))
        kit = provision(tmp_path / "sites.yml", tmp_path / "kits") / name
    assert run(monkeypatch, "prepare", kit, "--runtime", CONTAINER / "kubernetes.yaml", "-o", tmp_path / "out") == 0
    chart = tmp_path / "out/helm_chart"
    values = yaml.safe_load((chart / "values.yaml").read_text())
    assert re.fullmatch("[a-z]([-a-z0-9]{0,61}[a-z0-9])?", values["name"])
    assert values["name"] == values["serviceName"]
    assert values.get("siteName", name) == name
    if HELM is None:
        return
    subprocess.run([HELM, "lint", "--strict", chart], check=True, capture_output=True)
    words = [HELM, "template", "test", chart, "--namespace", "consilium"]
    made = list(yaml.safe_load_all(subprocess.run(words, check=True, capture_output=True, text=True).stdout))
    kinds = {one["kind"]: one for one in made}
    assert kinds.keys() == {"ServiceAccount", "Role", "RoleBinding", "Service", "Deployment"}
    assert {one["metadata"]["name"].removesuffix("-launcher") for one in made} == {values["name"]}
    pod = kinds["Deployment"]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["serviceAccountName"] == pod["containers"][0]["name"] == values["name"]
    (subject,) = kinds["RoleBinding"]["subjects"]
    components = {one["id"]: one.get("args") for one in read(tmp_path / "out/local/resources.json")["components"]}
    assert components["k8s_launcher"]["namespace"] == subject["namespace"]


def test_refused_settings_and_kits_are_one_line(
    kits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.yaml").write_text("runtime: vmware\n")
    (tmp_path / "list.yaml").write_text("runtime: [slurm]\n")
    out = tmp_path / "out"
    for kit, settings, told, code in (
        (kits / "hospital-a", tmp_path / "bad.yaml", "Config must contain runtime: docker, runtime: k8s, or runtime: slurm", 2),
        (kits / "hospital-a", tmp_path / "list.yaml", "list.yaml: FLARE cannot use it (TypeError", 2),
        (kits / "hospital-a", tmp_path / "none.yaml", "Config file not found", 2),
        (kits / "lead@hub.example", CONTAINER / "slurm.yaml", "neither a site's nor the server's startup kit", 2),
        (tmp_path, CONTAINER / "slurm.yaml", "no startup kit", 2),
    ):
        assert run(monkeypatch, "prepare", kit, "--runtime", settings, "-o", out) == code
        told_so = capsys.readouterr().err
        assert told in told_so
        assert told_so.count("\n") == 1
        assert not out.exists()


@pytest.mark.parametrize(
    "settings",
    ["{}", "state: ../../state", "{state: /srv/x, privacy: {ledger: ../l.sqlite}}", "{state: /srv/x, checkpoints: weights}"],
)
def test_second_ledger_is_refused(
    settings: str, kits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kit = Path(shutil.copytree(kits / "hospital-a", tmp_path / "kit", symlinks=True))
    (kit / "local/site.yaml").write_text(settings)
    assert run(monkeypatch, "prepare", kit, "--runtime", CONTAINER / "slurm.yaml", "-o", tmp_path / "out") == 2
    assert "a ledger and a budget of its own" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "settings",
    [
        "state: {}/local/state",
        "{{state: /srv/x, privacy: {{ledger: {}/startup/l.sqlite}}}}",
        "{{state: /srv/x, datasets: {{ward: {{datalist: lists/ward.json}}}}}}",
        "{{state: /srv/x, datalist: {}/local/list.json}}",
    ],
)
def test_state_in_a_folder_that_is_copied_is_refused(
    settings: str, kits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kit = Path(shutil.copytree(kits / "hospital-a", tmp_path / "kit", symlinks=True))
    (kit / "local/site.yaml").write_text(settings.format(kit))
    assert run(monkeypatch, "prepare", kit, "--runtime", CONTAINER / "slurm.yaml", "-o", tmp_path / "out") == 2
    assert "a ledger and a budget of its own" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_copy_into_the_kit_is_refused(kits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = sorted(kits.rglob("*"))
    for inside in ("prepared", "local/prepared", "../hospital-a/prepared"):
        words = ("--runtime", CONTAINER / "slurm.yaml", "-o", kits / "hospital-a" / inside)
        assert run(monkeypatch, "prepare", kits / "hospital-a", *words) == 2
    assert sorted(kits.rglob("*")) == before


def test_compose_services_are_closed(tmp_path: Path) -> None:
    services = yaml.safe_load((CONTAINER / "compose.yaml").read_text())["services"]
    assert services.keys() == {"site", "site-gpu", "server"}
    (check,) = re.findall("^HEALTHCHECK (.*) CMD (.*)$", (CONTAINER / "Dockerfile").read_text(), re.MULTILINE)
    times = {name.replace("-", "_"): value for name, value in re.findall(r"--([\w-]+)=(\w+)", check[0])}
    assert times.keys() == {"interval", "timeout", "start_period", "retries"}
    for one in services.values():
        assert one["healthcheck"]["test"] == ["CMD", *json.loads(check[1])] == ["CMD", "consilium", "doctor", "/kit"]
        assert {name: str(value) for name, value in one["healthcheck"].items() if name != "test"} == times
        assert one["read_only"] is True
        assert one["cap_drop"] == ["ALL"]
        assert one["security_opt"] == ["no-new-privileges:true"]
        assert not one["user"].startswith("0")
        targets = {volume["target"]: volume for volume in one["volumes"]}
        assert targets.get("${DATA:-/data}", {"read_only": True})["read_only"] is True
        assert not any("docker.sock" in str(volume) for volume in one["volumes"])
    assert "ports" not in services["site"]
    assert "ports" not in services["site-gpu"]


def test_kubernetes_names_the_image_of_this_version() -> None:
    image = yaml.safe_load((CONTAINER / "kubernetes.yaml").read_text())["parent"]["docker_image"]
    assert image == f"registry.example/consilium:{__version__.rpartition('.')[0]}"


IMAGE = ["hadolint", str(CONTAINER / "Dockerfile")]
WORKFLOWS = sorted(str(path) for path in (ROOT / ".github/workflows").glob("*.yml"))


def _schema(name: str, *files: str) -> list[str]:
    return ["check-jsonschema", "--quiet", "--builtin-schema", f"vendor.{name}", *files]


@pytest.mark.parametrize(
    "words",
    [
        IMAGE,
        pytest.param(_schema("compose-spec", str(CONTAINER / "compose.yaml")), marks=pytest.mark.slow),
        pytest.param(_schema("github-workflows", *WORKFLOWS), marks=pytest.mark.slow),
        pytest.param(_schema("dependabot", str(ROOT / ".github/dependabot.yml")), marks=pytest.mark.slow),
    ],
    ids=["image", "compose", "workflows", "dependabot"],
)
def test_linters_find_nothing(words: list[str]) -> None:
    done = subprocess.run([BIN / words[0], *words[1:]], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_workflows_pin_their_actions_and_leave_no_credentials() -> None:
    """A moved tag of an action, or a token that stays in a checkout, could change what a release contains."""
    done = subprocess.run([BIN / "zizmor", "--offline", "--quiet", *WORKFLOWS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_build_copies_the_wheelhouse_only() -> None:
    """A context with kits has private keys, which the build cache would keep."""
    lines = (CONTAINER / "Dockerfile").read_text().splitlines()
    copied = [line.split()[1:-1] for line in lines if line.startswith(("COPY", "ADD")) and "--from=installed" not in line]
    assert copied == [["requirements.lock", "SHA256SUMS"], ["wheels"]]
    page = (ROOT / "provisioning/installation.md").read_text()
    assert re.findall("docker build .*", page) == ["docker build -f provisioning/container/Dockerfile -t consilium WHEELHOUSE"]


def test_image_starts_the_kits_script() -> None:
    """Without an engine: the entry point is the kit's script as tests/deployment runs it, and never as root."""
    lines = (CONTAINER / "Dockerfile").read_text().splitlines()
    (entry,) = [json.loads(line.removeprefix("ENTRYPOINT ")) for line in lines if line.startswith("ENTRYPOINT")]
    assert entry == ["/bin/bash", "/kit/startup/sub_start.sh", "--once"]
    (user,) = [line.split()[1] for line in lines if line.startswith("USER")]
    assert int(user.split(":")[0]) > 0
