"""A startup kit's folder local/ with the participant's policies, made from templates and its entry in sites.yml; its readme."""

import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from nvflare.lighter.constants import ProvFileName

from consilium.config.deployment import DeploymentConfig, ServerEntry, SiteEntry, load_deployment
from consilium.core.errors import ConfigError
from consilium.core.storage import PUBLIC, read_json, write_atomic, write_json
from consilium.federation.run_folders import RUNS, STATE
from consilium.flare.job import late_join
from consilium.flare.kit import heartbeat_client, heartbeat_server, revocation
from consilium.flare.kit.kit_hardening import (
    ALLOW_LIST,
    CLASSES,
    add_unlock_prompt,
    allow_classes,
    harden_start_scripts,
    is_signed,
    shadow_job_settings,
)
from consilium.flare.kit.kit_reader import (
    ROLES,
    certificate_path,
    component_paths,
    kit_name,
    kit_role,
    participant_role,
    read_settings,
)
from consilium.flare.kit.processes import check_stopped

SITE_HEADER = "# This hospital's own settings; they win over every job. provisioning/site-settings.md lists all fields.\n"
MAY_BRING_CODE = ("project_admin", "lead")
"""Roles that may submit a job with code if sites.yml says `bundles: true` for the participant."""
COMPONENTS = {
    "server": (revocation.COMPONENT, late_join.COMPONENT, heartbeat_server.COMPONENT),
    "site": (heartbeat_client.COMPONENT,),
}
"""Our components that run in a kit's own process, by role: entries of the kit's local/resources.json."""
CLASS_PATHS = {
    path.rpartition(".")[2]: path
    for role in ROLES.values()
    for path in (*CLASSES[role], *(str(one["path"]) for one in COMPONENTS[role]))
}
"""The path, in this version, of each class that a kit or job may name, by class name. Kits of version 0.2 have older paths."""
POLICIES = ("authorization.json", "privacy.json", "site.yaml")
"""Files that tell our kits from FLARE's: each of our kits has at least one of them, and no kit made by FLARE has any."""


def write_local(folder: Path, entry: SiteEntry | ServerEntry) -> None:
    """Write the policy files of one participant into its kit's folder local/. Existing files are replaced.

    A site gets privacy.json, authorization.json, resources.json and site.yaml. The server has no data, and gets
    authorization.json and resources.json.
    """
    policy = _template("authorization.json")
    for role in MAY_BRING_CODE if entry.bundles else ():
        policy["permissions"][role]["byoc"] = "any"
    write_json(folder / "authorization.json", policy, indent=2)
    role = "server" if isinstance(entry, ServerEntry) else "site"
    resources = _template(f"resources_{role}.json") | {ALLOW_LIST: list(CLASSES[role])}
    if entry.bundles:  # the package may come with jobs only, and then the kit's own process cannot import our components
        resources["components"] = [one for one in resources["components"] if one not in COMPONENTS[role]]
    components = {one["id"]: one for one in resources["components"]}
    if isinstance(entry, ServerEntry):
        components["job_manager"]["args"]["uri_root"] = str(entry.state / "jobs")
        resources["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] = str(entry.state / "snapshots")
    else:
        components["resource_manager"]["args"] |= {"num_of_gpus": entry.gpus, "mem_per_gpu_in_GiB": entry.gpu_memory}
    write_json(folder / "resources.json", resources, indent=2)
    if isinstance(entry, ServerEntry):
        return
    write_json(folder / "privacy.json", _template("privacy.json"), indent=2)
    values = entry.site.model_dump(mode="json", exclude_unset=True)
    write_atomic(folder / "site.yaml", (SITE_HEADER + (yaml.safe_dump(values) if values else "{}\n")).encode())


def apply_local(sites: Path, kit: Path) -> Path:
    """Write a startup kit's local/ from the kit's entry in a sites.yml, apply `harden_kit`, and return local/.

    This is for kits that a hospital made with its own key. Raises ConfigError if the kit or its entry is missing, or if the kit
    runs.
    """
    check_stopped(kit)
    folder = kit / "local"
    deployment = load_deployment(sites)
    write_local(folder, find_entry(deployment, kit_name(kit), sites))
    harden_kit(kit)
    write_readme(kit, deployment.name)
    kit.chmod(0o700)  # the keys are private in any case, but FLARE's logs and site.yaml are not
    return folder


def update_local(folder: Path) -> Path:
    """Bring the allow-list and settings of a startup kit or simulator workspace to this version. Return the allow-list's file.

    A kit gets the classes and components of its role, and `harden_kit` is applied. A kit made by FLARE, without policies of
    ours, gets them too. A workspace has no role and gets the classes of all roles. Raises ConfigError, before a kit is changed,
    if its resources.json or privacy.json cannot be read, or if it runs.
    """
    check_stopped(folder)
    if (role := kit_role(folder)) is None:
        return allow_classes(folder, *CLASSES)
    path = folder / "local" / "resources.json"
    for file in (path, path.with_name("privacy.json")):
        if file.is_file():
            read_settings(file)  # before anything is changed
    harden_kit(folder)
    if not any((folder / "local" / name).exists() for name in POLICIES) and not (folder / STATE / RUNS).exists():
        server = ServerEntry(name="server", org="server", state=folder.resolve() / STATE)
        write_local(folder / "local", server if role == "server" else SiteEntry(name="site", org="site"))
    for file in (path, path.with_name("privacy.json")):
        if file.is_file():
            paths, text = re.compile(r'"consilium\.[\w.]*\.(\w+)"'), file.read_text(encoding="utf-8")
            text = paths.sub(lambda one: f'"{CLASS_PATHS[one[1]]}"' if one[1] in CLASS_PATHS else one[0], text)
            write_atomic(file, text.encode())
    if path.is_file() and (missing := missing_components(folder, role)):
        found = read_settings(path)
        added = [one for one in COMPONENTS[role] if one["id"] in missing]
        write_json(path, found | {"components": [*found.get("components", []), *added]}, indent=2)
    return allow_classes(folder, role)


def missing_components(kit: Path, role: str) -> list[str]:
    """Return the ids of our components that a kit lacks, such as a kit of an earlier version. Raises ConfigError."""
    there = component_paths(kit)
    return [one["id"] for one in COMPONENTS[role] if one["path"] not in there]


def harden_kit(kit: Path) -> None:
    """Protect a kit's processes from settings that a job brings and from Python modules in the caller's folder.

    A signed start script is not changed.
    """
    shadow_job_settings(kit)
    if not is_signed(kit / "startup"):
        harden_start_scripts(kit / "startup")
        add_unlock_prompt(kit / "startup")


def find_entry(deployment: DeploymentConfig, name: str, source: Path) -> SiteEntry | ServerEntry:
    """Return a site's or the server's entry by its name. Raises ConfigError if there is none."""
    entries: tuple[SiteEntry | ServerEntry, ...] = (deployment.server, *deployment.sites)
    for entry in entries:
        if entry.name == name:
            return entry
    raise ConfigError(f"{source}: sites: none is named {name!r}, which a startup kit is for; add it")


def _template(name: str) -> dict[str, Any]:
    return read_json(files("consilium.flare.kit").joinpath("policies", name))


# readme ----------------------------------------------------------------------------------------------------------------
# The readme.txt of a startup kit: what the folder is, what must stay private, and the first commands.

TEXT = """Startup kit of {name}, {what} of the federation {project}.

Keep this folder private (mode 700). Its private key is startup/{key}.
Anyone who holds this key can act as {name}.
If others may have read it, tell the hub, which revokes it.

{steps}

KIT is this folder. The commands need Consilium (`consilium --version`).
More: the page {page} of Consilium.
"""
COMPARE = """Then compare the line "root fingerprint" with the hub, by telephone."""
STEPS = {
    "site": f"""1. Write local/site.yaml: your data, your privacy budget, your rules for jobs.
2. Check:    consilium doctor KIT
   {COMPARE}
3. Start:    KIT/startup/start.sh        (stop: consilium stop KIT)
4. A job:    consilium approve JOB --kit KIT""",
    "server": f"""1. Check:    consilium doctor KIT
   {COMPARE}
2. Start:    KIT/startup/start.sh        (stop: consilium stop KIT)
3. Sites:    consilium sites --kit KIT""",
    "relay": f"""1. Check:    consilium doctor KIT
   {COMPARE}
2. Start:    KIT/startup/start.sh        (stop: consilium stop KIT)
3. A look:   consilium doctor KIT        (it then says whether the port listens)""",
    "person": f"""1. Check:    consilium doctor KIT
   {COMPARE}
2. Submit:   consilium submit JOB --kit KIT
3. Watch:    consilium status --kit KIT""",
}
WHAT = {"site": "a site", "server": "the server", "relay": "a relay", "person": "a person"}


def write_readme(kit: Path, project: str) -> None:
    """Write a kit's readme.txt, in place of FLARE's. `project`: the federation's name. Raises ConfigError if it is no kit."""
    (kit / "startup" / ProvFileName.README_TXT).unlink(missing_ok=True)  # FLARE's, in a person's kit
    role = participant_role(kit) or "site"
    key = certificate_path(kit).with_suffix(".key").name
    page = f"provisioning/{'administrator' if role == 'site' else 'engineer'}.md"
    text = TEXT.format(name=kit_name(kit), what=WHAT[role], project=project, key=key, steps=STEPS[role], page=page)
    write_atomic(kit / ProvFileName.README_TXT, text.encode(), PUBLIC)
