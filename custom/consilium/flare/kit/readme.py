"""The readme.txt of a startup kit: what the folder is, what must stay private, and the first commands."""

from pathlib import Path

from nvflare.lighter.constants import ProvFileName

from consilium.core.storage import PUBLIC, write_atomic
from consilium.flare.kit.kit_contents import certificate_path, kit_name, participant_role

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
PAGES = {
    "site": "provisioning/administrator.md",
    "server": "provisioning/engineer.md",
    "relay": "provisioning/engineer.md",
    "person": "provisioning/engineer.md",
}


def write_readme(kit: Path, project: str) -> None:
    """Write a kit's readme.txt, in place of FLARE's. `project`: the federation's name. Raises ConfigError if it is no kit."""
    (kit / "startup" / ProvFileName.README_TXT).unlink(missing_ok=True)  # FLARE's, in a person's kit
    role = participant_role(kit) or "site"
    key = certificate_path(kit).with_suffix(".key").name
    text = TEXT.format(name=kit_name(kit), what=WHAT[role], project=project, key=key, steps=STEPS[role], page=PAGES[role])
    write_atomic(kit / ProvFileName.README_TXT, text.encode(), PUBLIC)
