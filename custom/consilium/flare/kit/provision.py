"""Provisioning of startup kits: FLARE's provisioner with our builder, which writes each kit's local/ and signs its startup/."""

import io
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from nvflare.fuel.f3.comm_config import VarName
from nvflare.lighter.constants import CommConfigArg, CtxKey, PropKey, ProvFileName
from nvflare.lighter.entity import Project
from nvflare.lighter.prov_utils import prepare_builders
from nvflare.lighter.provision import prepare_project
from nvflare.lighter.provisioner import Provisioner
from nvflare.lighter.spec import Builder, ProvisionContext
from nvflare.lighter.utils import sign_folders

from consilium.config.deployment import DeploymentConfig, load_deployment
from consilium.core.errors import ConfigError, ConsiliumError
from consilium.core.schema import read_yaml
from consilium.core.storage import make_private_folder, read_json, write_atomic, write_json
from consilium.flare.kit.certificates import fingerprints
from consilium.flare.kit.kit_hardening import add_unlock_prompt, harden_start_scripts, shadow_job_settings
from consilium.flare.kit.local_folder import find_entry, write_local, write_readme

ROOT, ROOT_KEY = "root_cert", "root_pri_key"
"""Keys in FLARE's cert.json."""
FORMER = "former_root"
"""Our key in cert.json while a root is being replaced: {"cert", "key", "bridge"}. "cert" and "key" are the former root's."""
COPY = "cert.json.before"
"""The file beside cert.json with its content from before a command that changes it."""


class KitBuilder(Builder):
    """A FLARE builder that runs after CertBuilder. `sites`: the sites.yml, absolute or relative to the working directory.

    FLARE 2.9 does not sign ordinary kits. With our signatures, a server or site refuses to start if its certificates or
    connection settings were altered. local/ is not signed, because it belongs to the hospital.
    """

    def __init__(self, sites: str) -> None:
        self.sites = Path(sites)

    def build(self, project: Project, ctx: ProvisionContext) -> None:
        """Write local/ of the server and of every site, protect their kits from jobs' settings, then sign all startup/."""
        deployment = load_deployment(self.sites)
        Path(ctx.get_state_dir()).chmod(0o700)  # FLARE later writes the root key there, in a file that all users may read
        for participant in (project.get_server(), *project.get_clients()):
            local = Path(ctx.get_local_dir(participant))
            write_local(local, find_entry(deployment, participant.name, self.sites))
            generation = participant.get_prop(PropKey.COMM_CONFIG_ARGS, {}).get(CommConfigArg.CONN_GEN)
            # a site behind a relay must not connect past it
            shadow_job_settings(local.parent, {VarName.BACKBONE_CONN_GEN: generation} if generation else {})
        former = former_root(Path(ctx.get_state_dir()))
        for participant in project.get_all_participants():
            startup, key = Path(ctx.get_kit_dir(participant)), ctx[CtxKey.ROOT_PRI_KEY]
            harden_start_scripts(startup)
            add_unlock_prompt(startup)
            write_readme(startup.parent, deployment.name)
            startup.parent.chmod(0o700)
            if former:
                key = install_root_bridge(startup, former, participant == project.get_server()) or key
            sign_folders(str(startup), key, signature_file=ProvFileName.SIGNATURE_JSON)


def project_of(deployment: DeploymentConfig, sites: Path) -> dict[str, Any]:
    """Return FLARE's project.yml of a deployment as a dict. `sites`: the path of the sites.yml, which KitBuilder reads."""
    server = deployment.server
    people = [{"name": a.name, "type": "admin", "org": a.org, "role": a.role} for a in deployment.admins]
    hosts = {"default_host": server.name, "host_names": list(server.hosts)}
    host = {"name": server.name, "type": "server", "org": server.org, "fed_learn_port": server.port} | hosts
    builders = [
        ("nvflare.lighter.impl.workspace.WorkspaceBuilder", {}),
        ("nvflare.lighter.impl.static_file.StaticFileBuilder", {"config_folder": "config", "scheme": deployment.scheme}),
        ("nvflare.lighter.impl.cert.CertBuilder", {"root_valid_days": deployment.valid_days}),
        ("consilium.flare.kit.provision.KitBuilder", {"sites": str(sites)}),
    ]
    return {
        "api_version": 3,
        "name": deployment.name,
        "participants": [host, *({"name": s.name, "type": "client", "org": s.org} for s in deployment.sites), *people],
        "builders": [{"path": path, "args": args} for path, args in builders],
    }


def project_with_relays(deployment: DeploymentConfig, sites: Path, folder: Path) -> dict[str, Any]:
    """Return `project_of`, with the relays that an engineer has added to `folder`/project.yml, and the sites behind them.

    Without them, the server's next kit would no longer know the sites behind relays. A project.yml of another project, which
    was made in the same folder, does not count. Raises ConfigError.
    """
    raw, path = project_of(deployment, sites.resolve()), folder / "project.yml"
    read = read_yaml(path) if path.is_file() else None
    own = read if isinstance(read, dict) and read.get("name") == deployment.name else {}
    former = [one for one in own.get("participants") or () if isinstance(one, dict)]
    behind = {one.get("name"): {"connect_to": one["connect_to"]} for one in former if "connect_to" in one}
    relays = [one for one in former if one.get("type") == "relay"]
    if not all(isinstance(one.get("name"), str) for one in relays):
        raise ConfigError(f"{path}: participants: a relay has no `name`; give it one, as in `name: relay-1`")
    return raw | {"participants": [*(one | behind.get(one["name"], {}) for one in raw["participants"]), *relays]}


def provision(sites: Path, folder: Path, names: Collection[str] = (), renewed: Mapping[str, Any] | None = None) -> Path:
    """Make startup kits under `folder` and return their folder. `names`: by default all participants of the sites.yml.

    `folder`/PROJECT/state holds the project's root key, which can issue certificates. A second call keeps this key and makes
    new kits beside the old ones. `renewed`: the state to use instead of the one in `folder`. If no kits are made, the state
    stays as it was. Raises ConfigError for invalid settings, for a damaged state, and if `names` are given but `folder` holds
    no project yet; ConsiliumError with FLARE's reason if FLARE makes no kits.
    """
    deployment = load_deployment(sites)
    raw = project_with_relays(deployment, sites, folder)
    check_names(raw, names, sites)
    state = folder / deployment.name / "state" / "cert.json"
    if names and not state.is_file():
        raise ConfigError(f"--only: {state}: not there; give the folder that `consilium provision -o` made all kits in")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / "project.yml", yaml.safe_dump(raw, sort_keys=False).encode())
    make_private_folder(state.parent).chmod(0o700)  # before FLARE writes the root key there, in a file that all users may read
    errors: list[str] = []
    log = SimpleNamespace(error=errors.append, **dict.fromkeys(("warning", "info", "debug"), lambda message: None))
    if names and not any(one["type"] == "relay" for one in raw["participants"]):  # else the server's kit names all sites
        # FLARE needs the server, whose address is in every kit
        raw["participants"] = [one for one in raw["participants"] if one["name"] in {deployment.server.name, *names}]
    try:
        project = prepare_project(raw)
    except ValueError as error:
        raise ConfigError(f"{sites}: {error}") from None
    with _restore_on_failure(state):
        if renewed is not None:
            write_json(state, renewed)
        with redirect_stderr(io.StringIO()):  # FLARE prints the traceback of an error that it also logs
            context = Provisioner(str(folder.resolve()), prepare_builders(raw)).provision(project, logger=log)
        if context.get(CtxKey.BUILD_ERROR):
            raise ConsiliumError(f"{sites}: no kits were made: {' '.join(errors)}")
    state.chmod(0o600)
    kits = Path(context.get_result_location())
    for kit in kits.iterdir() if names else ():
        if kit.name not in names:
            shutil.rmtree(kit)
    return kits


def read_state(path: Path) -> dict[str, Any]:
    """Return the content of a project's cert.json. Raises ConfigError for a damaged file, as after a power cut."""
    try:
        found: dict[str, Any] = read_json(path)
    except (ValueError, RecursionError):
        copy = path.with_name(COPY)
        remedy = f"run `mv {copy} {path}`" if copy.is_file() else "restore it from a backup"
        raise ConfigError(f"{path}: is damaged; {remedy}") from None
    return found


@contextmanager
def _restore_on_failure(state: Path) -> Iterator[None]:
    """Put back a project's cert.json if the block fails. FLARE overwrites it in place, so a full disk would lose the root key.

    The copy is made before the block, because putting it back must not need space on the disk. Raises ConfigError.
    """
    if not state.is_file():
        yield
        return
    read_state(state)  # a damaged file must not replace an earlier copy
    copy = state.with_name(COPY)
    write_atomic(copy, state.read_bytes())
    try:
        yield
    except BaseException:
        os.replace(copy, state)
        raise
    copy.unlink()


def check_names(project: Mapping[str, Any], names: Collection[str], sites: Path) -> set[str]:
    """Return the names of a project's participants. Raises ConfigError if `names` has another one."""
    known = {one["name"] for one in project["participants"]}
    if unknown := sorted(set(names) - known):
        raise ConfigError(f"--only: {sites}: none is named {unknown[0]!r}; give one of {', '.join(sorted(known))}")
    return known


def former_root(state: Path) -> dict[str, str] | None:
    """Return the former root from a project's folder `state`. None if no root is being replaced."""
    path = state / "cert.json"
    return read_json(path).get(FORMER) if path.is_file() else None


def root_certificate_sha256(state: Path) -> str:
    """Return the SHA-256 of the current root's certificate, which sites compare by telephone."""
    return fingerprints(x509.load_pem_x509_certificate(read_json(state / "cert.json")[ROOT].encode()))[0]


def install_root_bridge(startup: Path, former: dict[str, str], server: bool) -> Any | None:
    """Append the bridge to a kit's certificates, so that the kit sends it.

    The `server`'s kit also gets the former root as its rootCA.pem. For it, return the former root's key, which must sign its
    startup/; return None for other kits.
    """
    for path in startup.glob("*.crt"):
        path.write_text(path.read_text(encoding="utf-8") + former["bridge"], encoding="utf-8")
    if not server:
        return None
    (startup / "rootCA.pem").write_text(former["cert"], encoding="utf-8")
    return load_pem_private_key(former["key"].encode(), password=None)
