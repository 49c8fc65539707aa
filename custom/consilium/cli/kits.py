"""The commands on startup kits: provision, renew, update-kit, lock, allow, revoke, stop, metrics, prepare."""

import os
import stat
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from consilium.cli.options import FormatOption, emit, show
from consilium.core.errors import ConfigError
from consilium.core.sanitize import rich_line
from consilium.core.storage import PUBLIC, write_atomic
from consilium.flare.admin.kit_metrics import HELP, collect_metrics
from consilium.flare.kit import deploy_prepare, key_lock, processes, renewal, revocation
from consilium.flare.kit.connection_refusals import noted_cause
from consilium.flare.kit.kit_reader import (
    LOCKED,
    certificate_path,
    has_private_key,
    kit_role,
    participant_role,
    sites_behind_relays,
)
from consilium.flare.kit.local_folder import apply_local, update_local
from consilium.flare.kit.provision import provision as make_kits, root_certificate_sha256 as root_fingerprint
from consilium.report.prometheus_text import exposition_text


def allow(
    folders: Annotated[list[Path], typer.Argument(metavar="KIT...", help="startup kits, or a workspace of FLARE's simulator")],
    format: FormatOption = "txt",
) -> None:
    """Let FLARE run Consilium's classes: list those of the kit's role, and no others, in local/resources.json.

    This also brings kits of an older version up to date, and adds Consilium's policies to kits that `nvflare provision` or
    `nvflare poc` made. Kits of people and relays need no list. Restart the participants afterwards.
    """
    found = dict[str, str]()
    for folder in folders:
        # a relay reads where it listens from local/comm_config.json, which a file in the kit's top folder would replace
        if (role := participant_role(folder)) in ("person", "relay"):
            path, text = folder, f"a {role}'s kit; it needs no list"
        else:
            path, text = update_local(folder), "lists the classes that jobs may name"
        found[str(path)] = text
        if format == "txt":  # at once, because a later kit may be refused
            show([f"{path}: {text}"])
    if format == "json":
        emit(found, "", format)


def revoke(
    name: Annotated[str, typer.Argument(help="a site's name, or a person's e-mail address")],
    kit: Annotated[Path, typer.Option("--kit", help="the server's startup kit, at the server")],
    format: FormatOption = "txt",
) -> None:
    """Let the server refuse all certificates of this name made until now. It takes effect at once, without a restart."""
    relays = {one for place in sites_behind_relays(kit) for one in place.split(".")} if kit_role(kit) == "server" else set()
    until = revocation.revoke(name, kit)
    text = (
        f"{name}: certificates made until {until} are refused from now on, and running jobs go on without it. A kit made "
        f"later is valid: `consilium renew SITES_YML -o kits --only {name}`. The server does not know all names: compare "
        "this one with sites.yml"
    )
    if name in relays:
        text += f". {name} is a relay: if it runs, it passes messages on until it is stopped. Stop it, or block its address"
    emit({"name": name, "until": until}, text, format)


# provision -------------------------------------------------------------------------------------------------------------
# The command `consilium provision`.

PASSPHRASE_FILE = "CONSILIUM_PASSPHRASE_FILE"
SitesArgument = Annotated[
    Path, typer.Argument(metavar="SITES_YML", help="list of the participants, such as provisioning/sites.yml")
]


def provision(
    sites: SitesArgument,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="folder in which to make the startup kits")] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", help="make a kit for this new participant only; may be repeated; default: all")
    ] = None,
    local: Annotated[
        Path | None, typer.Option(help="only write the policies into local/ of this kit, which `nvflare package` made")
    ] = None,
    format: FormatOption = "txt",
) -> None:
    """Make startup kits with Consilium's policies in them, or write the policies into an existing kit."""
    if (output is None) == (local is None):
        raise ConfigError("--output, --local: give exactly one: -o DIR makes kits, --local KIT changes one")
    if local and only:
        raise ConfigError("--only: is of kits that -o makes; leave it out")
    written = make_kits(sites, output, only or ()) if output else apply_local(sites, local or Path())
    if not output:
        emit({"local": str(written)}, f"{written}: policies written; start the participant to use them", format)
        return
    names, root = sorted(one.name for one in written.iterdir()), root_fingerprint(written.parent / "state")
    others = "\nAll other kits stay as they are; a running server takes the new ones without a restart." if only else ""
    text = f"""{written}: kits of {", ".join(names)}{others}
{written.parent}/state holds the root key: keep it where no one else can read it
SHA-256 of the root certificate, which each participant compares by telephone:
{root}"""
    emit({"kits": str(written), "participants": names, "root": root}, text, format)


# renewal ---------------------------------------------------------------------------------------------------------------
# The commands `consilium renew` and `consilium update-kit`.


def renew(
    sites: SitesArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="the folder in which `consilium provision -o` made kits")],
    only: Annotated[
        list[str] | None, typer.Option("--only", help="renew the kit of this participant only; may be repeated; default: all")
    ] = None,
    root: Annotated[
        Literal["keep", "new", "only-new"],
        typer.Option(help="new: add a root with a new key; only-new: the server no longer trusts the former root"),
    ] = "keep",
    format: FormatOption = "txt",
) -> None:
    """Make kits with new keys and certificates, and extend the root's, before the old ones expire. Old kits stay valid."""
    if root == "new" and only:
        raise ConfigError("--only: not with --root new, which makes everybody's kit anew; leave it out")
    kits = renewal.renew(sites, output, only or (), root)
    fingerprint = root_fingerprint(kits.parent / "state")
    text = f"{kits}: renewed kits; each goes to its participant, who runs `consilium update-kit KIT --from NEW_KIT`"
    whose = "root certificate" if root == "keep" else "new root"
    text += f". The {whose}'s fingerprint, to tell by telephone: {fingerprint}"
    emit({"kits": str(kits), "renewed": sorted(only or [p.name for p in kits.iterdir()]), "root": fingerprint}, text, format)


def update_kit(
    kit: Annotated[Path, typer.Argument(help="the startup kit in use; stop it first, or give --running")],
    *,
    new: Annotated[Path, typer.Option("--from", help="the renewed kit")],
    fingerprint: Annotated[str, typer.Option(help="SHA-256 of the root's certificate, if the root has a new key")] = "",
    running: Annotated[
        bool, typer.Option("--running", help="update a site while it runs; it uses the new kit from its next connection on")
    ] = False,
    format: FormatOption = "txt",
) -> None:
    """Replace a kit's startup/ by that of a renewed kit. The kit's local/, state and records stay as they are."""
    changed = renewal.update_kit(kit, new, fingerprint, running)
    after = "It counts from the next connection on" if running else "Start it again"
    if running and noted_cause(kit) is not None:
        after = "The server does not let this site in now, so stop it and start it again"
    text = f"{kit}: {', '.join(changed)}. {after}; then delete {kit / renewal.OLD}, which holds the former key"
    emit({"kit": str(kit), "changed": changed}, text, format)


# lock ------------------------------------------------------------------------------------------------------------------
# The commands `consilium lock` and `consilium unlock`.

MOST_PASSPHRASE = 4096
"""Characters of a passphrase, at most."""
PassphraseOption = Annotated[
    Path | None, typer.Option("--passphrase-file", help="file with the passphrase in its first line; default: ask for it")
]


def lock(
    kit: Annotated[Path, typer.Argument(help="a startup kit that is not in use")],
    passphrase_file: PassphraseOption = None,
    format: FormatOption = "txt",
) -> None:
    """Encrypt a kit's private keys with a passphrase, to send or store the kit; or close a locked kit that was opened."""
    is_locked = (kit / LOCKED).is_file()
    asks = not is_locked or key_lock.unlocked_key_files(kit)
    label = f"{kit / LOCKED} is gone; new passphrase" if key_lock.needs_new_passphrase(kit) else "Passphrase"
    left = key_lock.lock(kit, _passphrase(passphrase_file, confirm=not is_locked, label=label) if asks else None)
    if left:
        _warn(f"private keys in clear stay: {', '.join(map(str, left))}; move them to a safe place, or delete them")
    text = f"{kit}: its keys are locked; `consilium unlock {kit}`, or start.sh, opens it"
    text += "" if is_locked else ". Copies of the kit that were made before, as in a backup, hold them unencrypted"
    emit({"kit": str(kit), "in_clear": list(map(str, left))}, text, format)


def unlock(
    kit: Annotated[Path, typer.Argument(help="a locked startup kit")],
    passphrase_file: PassphraseOption = None,
    for_good: Annotated[bool, typer.Option("--for-good", help="put the keys back into the kit, unencrypted")] = False,
    format: FormatOption = "txt",
) -> None:
    """Open a locked kit. Its keys are then in memory until `consilium lock` or a restart of the machine."""
    kit = kit.resolve() if ".." in kit.parts else kit  # start.sh gives startup/.. of the kit
    if not (kit / LOCKED).is_file():
        raise ConfigError(f"{kit}: is not locked; nothing to do")
    if has_private_key(kit) and not for_good:
        emit({"kit": str(kit), "keys": None}, f"{kit}: is open already", format)
        return
    folder = key_lock.unlock(kit, _passphrase(passphrase_file), for_good)
    text = f"its keys are in {folder}" + ("" if for_good else ", in memory, until `consilium lock` or a restart")
    if not for_good and folder.is_relative_to(kit.resolve()):
        text = f"this machine has no folder in memory, so its keys are on disk in {folder} until `consilium lock`"
    emit({"kit": str(kit), "keys": str(folder)}, f"{kit}: {text}", format)


def _passphrase(file: Path | None, confirm: bool = False, label: str = "Passphrase") -> str:
    """Return the passphrase from a file, else from the file that PASSPHRASE_FILE names, else asked for at the terminal.

    `confirm`: it is a new passphrase, which a person types twice.
    """
    if (found := file or os.environ.get(PASSPHRASE_FILE)) is not None:
        path = Path(found)
        mode = path.stat().st_mode
        # systemd gives its credentials to the service by an access list, whose mask stands in the mode as the group's rights
        if stat.S_ISREG(mode) and mode & 0o077 and str(path.parent) != os.environ.get("CREDENTIALS_DIRECTORY"):
            _warn(f"{path}: mode {stat.S_IMODE(mode):o}: others can read the passphrase; run `chmod 600 {path}`")
        try:
            with path.open(encoding="utf-8") as opened:  # maybe a pipe, or a device without an end
                line = opened.readline(MOST_PASSPHRASE + 1).rstrip("\n")
        except UnicodeDecodeError:
            raise ConfigError(f"{path}: not text in UTF-8; give a file whose first line is the passphrase") from None
        if len(line) > MOST_PASSPHRASE:
            raise ConfigError(f"{path}: its first line has over {MOST_PASSPHRASE:,} characters; give a shorter passphrase")
        return line
    if not sys.stdin.isatty():
        raise ConfigError(f"{label}: nobody to ask; give --passphrase-file, or {PASSPHRASE_FILE} in the environment")
    asked: str = typer.prompt(label, hide_input=True, confirmation_prompt=confirm, err=True)
    return asked


def _warn(text: str) -> None:
    show([rich_line(f"warning: {text}", "yellow", 4000)], errors=True)


# stop ------------------------------------------------------------------------------------------------------------------
# The command `consilium stop`.

KitArgument = Annotated[Path, typer.Argument(help="a site's or the server's startup kit")]


def stop(kit: KitArgument, format: FormatOption = "txt") -> None:
    """Stop the site or server that runs from a kit on this machine, with its jobs' processes, until it is started again.

    A site continues its jobs after its next start. A server's jobs are lost until `consilium resume`. A service or container
    is stopped by its own command instead, because it may start the processes again.
    """
    certificate_path(kit)
    found, jobs = processes.processes(kit), processes.processes(kit, jobs_only=True)
    processes.stop([kit])
    text = f"{kit}: stopped (processes {', '.join(str(one.pid) for one in found)})" if found else f"{kit}: nothing runs from it"
    if jobs and kit_role(kit) == "server":
        text += "; jobs ran: `consilium status` shows them as LOST, and `consilium resume` continues them"
    emit({"kit": str(kit), "stopped": sorted(one.pid for one in found)}, text, format)


# prepare ---------------------------------------------------------------------------------------------------------------
# The command `consilium prepare`.


def prepare(
    kit: KitArgument,
    runtime: Annotated[Path, typer.Option(help="FLARE's settings of the runtime, such as provisioning/container/slurm.yaml")],
    output: Annotated[Path, typer.Option("--output", "-o", help="new folder for the prepared kit")],
    format: FormatOption = "txt",
) -> None:
    """Prepare a kit for Docker, Kubernetes or Slurm by `nvflare deploy prepare`, with the kit's policies in it."""
    prepared = deploy_prepare.prepare(kit, runtime, output)
    emit({"kit": str(output)}, [f"{prepared}: prepared, with the policies of {kit}"], format)


# metrics ---------------------------------------------------------------------------------------------------------------
# The command `consilium metrics`.


def metrics(
    kit: KitArgument,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="FILE.prom for node_exporter's textfile collector")
    ] = None,
) -> None:
    """Write numbers for Prometheus: rounds, sites last seen, refusals, epsilon left, disk, certificates. Opens no port."""
    text = exposition_text(collect_metrics(kit), HELP)
    if output is None:
        typer.echo(text, nl=False)
    elif output.suffix != ".prom":
        raise ConfigError(f"--output: {output}: the collector reads files that end in .prom; name it so")
    else:
        write_atomic(output, text.encode(), PUBLIC)
