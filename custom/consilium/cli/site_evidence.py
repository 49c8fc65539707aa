"""The commands `consilium evidence`, for signed archives of runs, and `forget`, which deletes runs."""

import json
import sys
from contextlib import suppress
from importlib.metadata import distributions
from pathlib import Path
from typing import Annotated, Any

import typer

from consilium.cli.options import FormatOption, emit
from consilium.cli.site_records import find_site_records, markdown, read_record
from consilium.core.errors import ConfigError, ConsiliumError, ExitCode, raise_first
from consilium.core.sanitize import shown
from consilium.federation import delete_run
from consilium.federation.run_folders import RUNS, STATE, check_run_name
from consilium.flare.admin.session import received_jobs, stored_jobs
from consilium.flare.kit.certificates import root_key_fingerprint
from consilium.flare.kit.evidence_archive import ACCEPTED, LEDGER, copy_ledger, pack, verify as verify_archive, verify_chains
from consilium.flare.kit.kit_reader import kit_name, kit_role
from consilium.privacy.accounting import VOID
from consilium.privacy.audit_log import FILE
from consilium.privacy.ledger import Ledger, read_accepted_seals
from consilium.report.audit_tables import privacy_warnings
from consilium.report.run_files import versions

POLICIES = ("site.yaml", "privacy.json", "authorization.json", "resources.json", "approved.json")
CLAIMS = """# Evidence of {site} on run {experiment}

For the ethics board and the data protection officer. `what-left.md` is the record in words; `audit-1.jsonl` is the record
itself, in which each line holds the hash of the one before it. `ledger.sqlite` is the site's privacy ledger, of all its jobs,
because they share one budget. `policy-*` is what the site allows, `job.yaml` the job as it ran where FLARE still has it,
`packages.txt` all that was installed when this was made. `accepted.json`, where there is one, names lost rows that the
administrator has put on record. `attack-*.json`, where there is one, is the result of an attack on the run's models. A bound
over the epsilon that is promised for the same unit disproves the promise. A bound under it proves nothing.

{warnings}What is claimed: no message of this run left the site beside those in the record, as far as the guard of this package
sent it; the record and the ledger are as they were written ({intact}); privacy is as `what-left.md` says, no more.

What is not: that shared numbers reveal nothing without differential privacy; that others deleted what they received; anything
about software that does not belong to this package. Who holds the kit's key could have written another record from its
beginning: compare its seal with the results at the server.
"""


def evidence(
    experiment: Annotated[str, typer.Argument(help="the run's name, or the archive for --verify")],
    kit: Annotated[
        Path | None, typer.Option("--kit", help="the site's startup kit; for --verify, any kit of the project")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="archive to write; default: EXPERIMENT.evidence.zip")
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="check an archive; exit code 1 if it was altered")] = False,
    attack: Annotated[
        list[Path] | None, typer.Option(help="output of `consilium privacy attack --format json` on this run; may be repeated")
    ] = None,
    fingerprint: Annotated[str, typer.Option(help="for --verify without a kit: SHA-256 of the root's certificate")] = "",
    format: FormatOption = "txt",
) -> None:
    """Make a signed archive of a run at this site: policies, job, record of what left, ledger, versions. Or check one."""
    problems = {
        "--attack: not with --verify, which adds nothing to an archive; leave it out": verify and attack,
        "--verify: give --kit (any kit of the project) or --fingerprint: anybody can sign with a root of his own": (
            verify and (kit is None) == (not fingerprint)
        ),
    }
    raise_first(problems)
    archive = Path(experiment) if verify else output or Path(f"{experiment}.evidence.zip")
    if not verify:
        if kit is None:
            raise ConfigError("--kit: give the site's startup kit, whose key signs")
        attacks = dict[str, bytes]()
        for number, path in enumerate(attack or [], start=1):
            try:
                content = path.read_bytes()
                told = json.loads(content)
                model, results = Path(told["model"]), told["attacks"]
            except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
                raise ConfigError(
                    f"--attack: {path}: cannot be read ({type(error).__name__}); give the output of `consilium privacy attack "
                    "--format json`"
                ) from None
            if experiment not in model.parts or not results:
                raise ConfigError(
                    f"--attack: {path}: is of {shown(model, 200)}, no model of run {experiment}; attack one of its"
                )
            attacks[f"attack-{number}.json"] = content
        pack(kit, experiment, evidence_files(experiment, kit) | attacks, archive)
    found = {"archive": str(archive)} | verify_archive(archive, root_key_fingerprint(kit) if kit else fingerprint)
    signed = "the signature and the project's root are right; " if verify else ""
    whole = not found["record"] and not found["ledger"]
    broken = "; ".join(f"{what} ALTERED: {found[what]}" for what in ("record", "ledger") if found[what])
    chain = broken or f"record ({found['messages']} messages) and ledger ({found['rows']} rows) are as they were written"
    of = f"{shown(found['archive'])}: {shown(found['site'])}, run {shown(found['experiment'])}, {found['made']}"
    emit(found | {"intact": whole}, f"{of}: {signed}{chain}", format)
    raise typer.Exit(0 if whole else 1)


def find_run_paths(experiment: str, kit: Path) -> tuple[Path, Path, Path]:
    """Return a run's folder at a site, the site's state folder, and its ledger. Raises ConfigError without such a run."""
    settings = kit / "local" / "site.yaml"
    if kit_role(kit) == "server" or not settings.is_file():
        raise ConfigError(f"--kit: {kit}: not a site's startup kit (no local/site.yaml); give its folder")
    records = find_site_records(kit)
    return _find_run_folder(experiment, records.root, kit), records.root, records.ledger


def _jobs_by_run(kit: Path) -> dict[str, list[Path]]:
    """Return FLARE's folders of the jobs that a site has received, by the name of their run, without names of no valid run."""
    found: dict[str, list[Path]] = {}
    for folder, meta in received_jobs(kit).items():
        with suppress(ConfigError):
            found.setdefault(check_run_name(meta["experiment"]), []).append(folder)
    return found


def _find_run_folder(experiment: str, state: Path, site: Path | None = None) -> Path:
    """Return a run's folder. `site`: a site's kit. Raises ConfigError if there is no such run."""
    folder = state / RUNS / check_run_name(experiment)
    if not folder.is_dir() and site and (jobs := _jobs_by_run(site).get(experiment)):
        raise ConfigError(
            f"{experiment}: the job did not begin at this site, so no update left and {state} has no record of it; "
            f"{jobs[-1] / 'log.txt'} says why"
        )
    if not folder.is_dir():
        known = ", ".join(sorted(p.name for p in (state / RUNS).iterdir() if p.is_dir())) if (state / RUNS).is_dir() else "none"
        raise ConfigError(f"{experiment}: no such run here; there: {shown(known, 400)}")
    return folder


def evidence_files(experiment: str, kit: Path) -> dict[str, bytes]:
    """Return the files of the archive, except its signature, by name. Raises ConfigError if ledger or record is damaged."""
    folder, state, ledger = find_run_paths(experiment, kit)
    records = sorted(path for path in folder.rglob(FILE) if path.is_file() and not path.is_symlink())
    if not records:
        raise ConfigError(f"{folder}: holds no record of what left: nothing did, or it was removed")
    found = {f"audit-{i + 1}.jsonl": path.read_bytes() for i, path in enumerate(records)}
    found["versions.json"] = json.dumps(versions(), indent=1).encode()
    if copy := copy_ledger(ledger):
        found[LEDGER] = copy
    if lost := read_accepted_seals(state):
        found[ACCEPTED] = json.dumps(sorted(lost)).encode()
    found |= {f"policy-{name}": (kit / "local" / name).read_bytes() for name in POLICIES if (kit / "local" / name).is_file()}
    whole = verify_chains(found)
    intact = "record and ledger are whole" if not whole["record"] and not whole["ledger"] else "ALTERED, see `--verify`"
    read = [read_record(path) for path in records]
    words = "\n\n".join(markdown(one, f"audit-{i + 1}.jsonl") for i, one in enumerate(read))
    entries = Ledger(ledger).entries() if ledger.is_file() and not whole["ledger"] else []
    warnings = privacy_warnings([message for one in read for message in one["messages"]])
    if void := [entry for entry in entries if entry.is_void]:
        named = ", ".join(sorted({shown(entry.job) for entry in void}))
        warnings.append(f"{len(void)} rows of the ledger (jobs {named}) are {VOID}. They still count")
    described = [one.metadata for one in distributions()]  # each reading of `metadata` parses the package's file anew
    installed = sorted({f"{one['Name']}=={one['Version']}" for one in described if one["Name"]})
    packages = "\n".join([f"python=={sys.version.split()[0]}", *installed, ""])
    bold = "".join(f"**{one}.**\n\n" for one in warnings)
    claims = CLAIMS.format(site=kit_name(kit), experiment=experiment, intact=intact, warnings=bold)
    found |= {"README.md": claims.encode(), "what-left.md": words.encode(), "packages.txt": packages.encode()}
    # the job.yaml of each submission that FLARE still has
    ids = sorted({str(m["flare_job"]) for one in read for m in one["messages"] if m.get("flare_job")})
    names = [name for name in ids if name.replace("-", "").isalnum()]
    jobs = [path for name in names for path in sorted((kit / name).glob("app*/config/job.yaml"))]
    return found | {f"job{'' if len(jobs) == 1 else f'-{i + 1}'}.yaml": path.read_bytes() for i, path in enumerate(jobs)}


def forget(
    experiment: Annotated[str, typer.Argument(help="the run's name; not with --expired")] = "",
    *,
    kit: Annotated[Path, typer.Option("--kit", help="the site's startup kit, or the server's")],
    reason: Annotated[str, typer.Option(help="the reason, such as who withdrew, for the record; no names of patients")] = "",
    expired: Annotated[
        bool, typer.Option("--expired", help="delete all runs older than `retention_days` in site.yaml")
    ] = False,
    format: FormatOption = "txt",
) -> None:
    """Delete the files of a run at this site or at the server: models, pictures, scores, FLARE's files.

    A site's ledger and its record of what left stay. Messages that have left cannot be taken back. audit.jsonl records this,
    and what is deleted, when, by whom and why. Exit code 1 if --expired cannot delete a run.
    """
    if bool(experiment) == expired:
        raise ConfigError("EXPERIMENT, --expired: give exactly one")
    if not (reason := "retention_days of site.yaml" if expired else reason.strip()):
        raise ConfigError("--reason: empty; say why, for the record")
    names = [experiment]
    if expired:
        site, root, _ = find_site_records(kit)
        if site.retention_days is None:
            raise ConfigError(f"{kit / 'local' / 'site.yaml'}: retention_days: not set, so no run is past its time; set it")
        names = delete_run.expired_runs(root, site.retention_days, _jobs_by_run(kit))
    found, lines, failed = [], [], ExitCode.DONE
    for name in names:
        try:
            one = _forget_run(name, kit, reason)
        except (ConsiliumError, OSError, ValueError) as error:  # such as a damaged record, or a file of another user
            if not expired:
                if isinstance(error, UnicodeError):
                    raise ConfigError(f"{name}: its {FILE} is no text; restore it, or delete it by hand, and repeat") from None
                raise
            found.append({"run": name, "error": str(error)})
            lines.append(f"{name}: failed: {shown(error, 400)}")
            failed = ExitCode.FAILED
            continue
        found.append(one)
        lines.append(f"{one['run']}: {one['files']} files ({one['bytes']:,} bytes) deleted, on record in {one['record']}")
        lines += [f"  stays: {one['stays']}", f"  cannot be taken back: {one['left']}"]
    emit(found, lines or "nothing is past its time", format)
    raise typer.Exit(failed)


def _forget_run(name: str, kit: Path, reason: str) -> dict[str, Any]:
    """Delete a run at the server or site of a kit. Return the record."""
    if kit_role(kit) == "server":
        return delete_run.delete_at_server(_find_run_folder(name, kit / STATE), stored_jobs(kit, name), kit / STATE, reason)
    received = _jobs_by_run(kit).get(name, [])
    state = find_site_records(kit).root if received else find_run_paths(name, kit)[1]
    return delete_run.delete_at_site(kit, state / RUNS / name, state, reason, received)
