"""A startup kit's local/ folder: a participant's policies, from the templates in policies/ and its entry in sites.yml."""

import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from consilium.config.deployment import DeploymentConfig, ServerEntry, SiteEntry, load_deployment
from consilium.core.errors import ConfigError
from consilium.core.storage import write_atomic
from consilium.federation.run_folders import RUNS, STATE
from consilium.flare.job import late_join
from consilium.flare.kit import heartbeat_client, heartbeat_server, revocation
from consilium.flare.kit.class_allow_list import CLASSES, KEY, allow_classes
from consilium.flare.kit.kit_contents import kit_name, kit_role
from consilium.flare.kit.kit_hardening import is_signed, leave_callers_folder, pin_settings, unlock_at_start
from consilium.flare.kit.processes import check_stopped

SITE_HEADER = "# This hospital's own settings; they win over every job. provisioning/site-settings.md lists all fields.\n"
MAY_BRING_CODE = ("project_admin", "lead")
"""Who may submit a job with code where sites.yml says `bundles: true`."""
ROLES = {"client.crt": "site", "server.crt": "server"}
"""A kit's role by the certificate it holds; a person's has client.crt too, and is neither."""
COMPONENTS = {
    "server": (revocation.COMPONENT, late_join.COMPONENT, heartbeat_server.COMPONENT),
    "site": (heartbeat_client.COMPONENT,),
}
"""Our components in a kit's own process, by role: entries of its local/resources.json."""
CLASS_PATHS = {
    path.rpartition(".")[2]: path
    for role in ROLES.values()
    for path in (*CLASSES[role], *(str(one["path"]) for one in COMPONENTS[role]))
}
"""Where each class that a kit or a job may name is in this version; kits of 0.2 name the same classes in former modules."""
POLICIES = ("authorization.json", "privacy.json", "site.yaml")
"""Files of which each of our kits has one, and none of FLARE's has any: a kit that has lost some of them is not FLARE's."""


def write_local(folder: Path, entry: SiteEntry | ServerEntry) -> None:
    """Write the policy files of one participant into its kit's local/ folder, replacing existing ones.

    A site gets privacy.json, authorization.json, resources.json and site.yaml; the server, without data, the middle two.
    """
    policy = _template("authorization.json")
    for role in MAY_BRING_CODE if entry.bundles else ():
        policy["permissions"][role]["byoc"] = "any"
    _write_json(folder / "authorization.json", policy)
    role = "server" if isinstance(entry, ServerEntry) else "site"
    resources = _template(f"resources_{role}.json") | {KEY: list(CLASSES[role])}
    if entry.bundles:  # the package may be in jobs only, so a kit's own process cannot load its components
        resources["components"] = [one for one in resources["components"] if one not in COMPONENTS[role]]
    components = {one["id"]: one for one in resources["components"]}
    if isinstance(entry, ServerEntry):
        components["job_manager"]["args"]["uri_root"] = str(entry.state / "jobs")
        resources["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] = str(entry.state / "snapshots")
    else:
        gpus = {"num_of_gpus": entry.gpus, "mem_per_gpu_in_GiB": entry.gpu_memory}
        components["resource_manager"]["args"] |= gpus
    _write_json(folder / "resources.json", resources)
    if isinstance(entry, ServerEntry):
        return
    _write_json(folder / "privacy.json", _template("privacy.json"))
    values = entry.site.model_dump(mode="json", exclude_unset=True)
    write_atomic(folder / "site.yaml", (SITE_HEADER + (yaml.safe_dump(values) if values else "{}\n")).encode())


def apply_local(sites: Path, kit: Path) -> Path:
    """Write local/ of a startup kit from its entry in a sites.yml, close the kit to jobs, and return local/.

    For kits that a hospital made with its own key. Raises ConfigError if the kit or its entry is missing, or the kit runs.
    """
    check_stopped(kit)
    folder = kit / "local"
    write_local(folder, find_entry(load_deployment(sites), kit_name(kit), sites))
    close_to_jobs(kit)
    return folder


def update_local(folder: Path) -> Path:
    """Put our classes, and no other name of ours, on the allow-list of a startup kit or simulator workspace; return its file.

    A kit gets the classes and components of its role, and is closed to jobs; a kit of FLARE's own without any policy gets ours.
    A workspace has no role and gets all classes. Raises ConfigError if the list cannot be read, or the kit runs.
    """
    check_stopped(folder)
    if (role := kit_role(folder)) is None:
        return allow_classes(folder, *CLASSES)
    close_to_jobs(folder)
    if not any((folder / "local" / name).exists() for name in POLICIES) and not (folder / STATE / RUNS).exists():
        server = ServerEntry(name="server", org="server", state=folder.resolve() / STATE)
        write_local(folder / "local", server if role == "server" else SiteEntry(name="site", org="site"))
    path = folder / "local" / "resources.json"
    for file in (path, path.with_name("privacy.json")):
        if file.is_file():
            text = file.read_text(encoding="utf-8")
            write_atomic(file, re.sub(r'"consilium\.[\w.]*\.(\w+)"', _current_class_path, text).encode())
    if path.is_file() and (missing := missing_components(folder, role)):
        found = json.loads(path.read_text(encoding="utf-8"))
        added = [one for one in COMPONENTS[role] if one["id"] in missing]
        _write_json(path, found | {"components": [*found.get("components", []), *added]})
    return allow_classes(folder, role)


def _current_class_path(former: re.Match[str]) -> str:
    """Return the place, in quotes, of a class that a file names, or the name as it is for no class of ours."""
    return f'"{CLASS_PATHS[former[1]]}"' if former[1] in CLASS_PATHS else former[0]


def missing_components(kit: Path, role: str) -> list[str]:
    """Return the ids of our components that a kit lacks, such as one of an earlier version. Raises ConfigError."""
    path = kit / "local" / "resources.json"
    try:
        listed = json.loads(path.read_text(encoding="utf-8")).get("components", [])
        there = {one.get("path") for one in listed}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); run `consilium provision SITES_YML --local KIT`") from None
    return [one["id"] for one in COMPONENTS[role] if one["path"] not in there]


def close_to_jobs(kit: Path) -> None:
    """Keep jobs' settings and the caller's folder out of the kit's processes. A signed start script stays as it is."""
    pin_settings(kit)
    if not is_signed(kit / "startup"):
        leave_callers_folder(kit / "startup")
        unlock_at_start(kit / "startup")


def find_entry(deployment: DeploymentConfig, name: str, source: Path) -> SiteEntry | ServerEntry:
    """Return a site's or the server's entry by its name. Raises ConfigError if there is none."""
    entries: dict[str, SiteEntry | ServerEntry] = {deployment.server.name: deployment.server}
    entries |= {site.name: site for site in deployment.sites}
    if name not in entries:
        raise ConfigError(f"{source}: sites: none is named {name!r}, which a startup kit is for; add it")
    return entries[name]


def _template(name: str) -> dict[str, Any]:
    return json.loads(files("consilium.flare.kit").joinpath("policies", name).read_text(encoding="utf-8"))


def _write_json(path: Path, values: dict[str, Any]) -> None:
    write_atomic(path, json.dumps(values, indent=2).encode() + b"\n")
