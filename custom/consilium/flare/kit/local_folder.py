"""A startup kit's local/ folder: what a site or server allows, from the templates in policies/ and one entry of sites.yml."""

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from nvflare.fuel.f3.cellnet.identity import get_cert_common_name
from nvflare.lighter.utils import load_crt

from consilium.config.deployment import DeploymentConfig, ServerEntry, SiteEntry, load_deployment
from consilium.core.errors import ConfigError
from consilium.core.storage import write_atomic
from consilium.flare.job import late_join
from consilium.flare.kit import heartbeat_client, heartbeat_server, revocation
from consilium.flare.kit.class_allow_list import CLASSES, KEY, allow_classes
from consilium.flare.kit.kit_hardening import is_signed, leave_callers_folder, pin_settings

SITE_HEADER = "# This hospital's own settings; they win over every job. provisioning/administrator.md lists all fields.\n"
MAY_BRING_CODE = ("project_admin", "lead")
"""Who may submit a job with code where sites.yml says `bundles: true`."""
COMPONENTS = {
    "server": (revocation.COMPONENT, late_join.COMPONENT, heartbeat_server.COMPONENT),
    "site": (heartbeat_client.COMPONENT,),
}
"""What runs of ours in a kit's own process, by role: parts of its local/resources.json."""
ROLES = {"client.crt": "site", "server.crt": "server"}
"""A kit's role by the certificate it holds."""


def write_local(folder: Path, entry: SiteEntry | ServerEntry) -> None:
    """Write the policy files of one participant into its kit's local/ folder, replacing those that are there.

    A site gets privacy.json, authorization.json, resources.json and site.yaml; the server has no data, so the middle two.
    """
    _write_json(folder / "authorization.json", _authorization(entry.bundles))
    if isinstance(entry, ServerEntry):
        _write_json(folder / "resources.json", _server_resources(entry))
        return
    _write_json(folder / "privacy.json", _template("privacy.json"))
    _write_json(folder / "resources.json", _site_resources(entry))
    values = entry.site.model_dump(mode="json", exclude_unset=True)
    write_atomic(folder / "site.yaml", (SITE_HEADER + (yaml.safe_dump(values) if values else "{}\n")).encode())


def apply_local(sites: Path, kit: Path) -> Path:
    """Write local/ of one startup kit from its entry in a sites.yml, close the kit to jobs, and return that folder.

    For kits that a hospital made with its own key. Raises ConfigError if the kit or its entry is missing.
    """
    folder = kit / "local"
    write_local(folder, find_entry(load_deployment(sites), kit_name(kit), sites))
    close(kit)
    return folder


def update(folder: Path) -> Path:
    """Let a startup kit, or a workspace of FLARE's simulator, run our classes and no other name of ours; return their list.

    A kit gets the classes and components of its role and is closed to all else of a job; a workspace has no role and gets all
    classes. Raises ConfigError if the list is not readable.
    """
    if (role := kit_role(folder)) is None:
        return allow_classes(folder, *CLASSES)
    close(folder)
    _add_components(folder, role)
    return allow_classes(folder, role)


def lacking(kit: Path, role: str) -> list[str]:
    """Return the ids of the components of ours that a kit has not, as one of an earlier version. Raises ConfigError."""
    path = kit / "local" / "resources.json"
    try:
        listed = json.loads(path.read_text(encoding="utf-8")).get("components", [])
        there = {one.get("path") for one in listed}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); run `consilium provision SITES_YML --local KIT`") from None
    return [one["id"] for one in COMPONENTS[role] if one["path"] not in there]


def _add_components(kit: Path, role: str) -> None:
    """Put the components of ours into a kit of an earlier version."""
    path = kit / "local" / "resources.json"
    if path.is_file() and (missing := lacking(kit, role)):
        found = json.loads(path.read_text(encoding="utf-8"))
        added = [one for one in COMPONENTS[role] if one["id"] in missing]
        _write_json(path, found | {"components": [*found.get("components", []), *added]})


def close(kit: Path) -> None:
    """Keep a job's files and the caller's folder out of the kit's processes. A signed start script only the hub can change."""
    pin_settings(kit)
    if not is_signed(kit / "startup"):
        leave_callers_folder(kit / "startup")


def kit_role(kit: Path) -> str | None:
    """Return whether a kit is a "site"'s or the "server"'s, as its certificate says; None where there is none."""
    return next((role for name, role in ROLES.items() if (kit / "startup" / name).is_file()), None)


def kit_name(kit: Path) -> str:
    """Return the participant a site's or server's kit is for, as its certificate says. Raises ConfigError."""
    return get_cert_common_name(load_crt(certificate(kit)))


def certificate(kit: Path) -> Path:
    """Return the file of the kit's own certificate. Raises ConfigError if there is none."""
    for name in ROLES:
        if (path := kit / "startup" / name).is_file():
            return path
    raise ConfigError(f"{kit}: no startup kit: startup/client.crt is missing; give the folder that has startup/ and local/")


def find_entry(deployment: DeploymentConfig, name: str, source: Path) -> SiteEntry | ServerEntry:
    """Return a site's or the server's entry by its name. Raises ConfigError if there is none."""
    entries: dict[str, SiteEntry | ServerEntry] = {deployment.server.name: deployment.server}
    entries |= {site.name: site for site in deployment.sites}
    if name not in entries:
        raise ConfigError(f"{source}: sites: none is named {name!r}, which a startup kit is for; add it")
    return entries[name]


def _authorization(bundles: bool) -> dict[str, Any]:
    policy = _template("authorization.json")
    for role in MAY_BRING_CODE if bundles else ():
        policy["permissions"][role]["byoc"] = "any"
    return policy


def _site_resources(entry: SiteEntry) -> dict[str, Any]:
    resources = _template("resources_site.json") | {KEY: list(CLASSES["site"])}
    if entry.bundles:
        _without_ours(resources, "site")
    _component(resources, "resource_manager")["args"] |= {"num_of_gpus": entry.gpus, "mem_per_gpu_in_GiB": entry.gpu_memory}
    return resources


def _server_resources(entry: ServerEntry) -> dict[str, Any]:
    resources = _template("resources_server.json") | {KEY: list(CLASSES["server"])}
    if entry.bundles:
        _without_ours(resources, "server")
    _component(resources, "job_manager")["args"]["uri_root"] = str(entry.state / "jobs")
    resources["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] = str(entry.state / "snapshots")
    return resources


def _without_ours(resources: dict[str, Any], role: str) -> None:
    """Leave our components out: the package may be in jobs only, and a kit's own process cannot count on it."""
    resources["components"] = [one for one in resources["components"] if one not in COMPONENTS[role]]


def _component(resources: dict[str, Any], id: str) -> dict[str, Any]:
    return next(one for one in resources["components"] if one["id"] == id)


def _template(name: str) -> dict[str, Any]:
    return json.loads(files("consilium.flare.kit").joinpath("policies", name).read_text(encoding="utf-8"))


def _write_json(path: Path, values: dict[str, Any]) -> None:
    write_atomic(path, json.dumps(values, indent=2).encode() + b"\n")
