"""The commands `consilium doctor` and `approve`, with which a site's administrator checks a kit and a job."""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from consilium.cli.options import FormatOption, emit, table_console
from consilium.client import approval
from consilium.client.finding import Finding
from consilium.config.site import plugins_allowed_by_kit
from consilium.core.errors import ConfigError, ConsiliumError, ExitCode
from consilium.core.lazy import call
from consilium.core.registry import Plugins
from consilium.core.sanitize import shown
from consilium.flare.admin.session import connect
from consilium.flare.kit.doctor import examine
from consilium.flare.kit.kit_reader import participant_role


def doctor(
    kit: Annotated[Path, typer.Argument(help="the site's startup kit")] = Path(),
    job: Annotated[
        Path | None, typer.Option(help="a job.yaml: check that its training step fits into the site's memory")
    ] = None,
    format: FormatOption = "txt",
) -> None:
    """Check a site before it joins: versions, kit, policies, data, checkpoints, GPU, disk, clock, server.

    Exit code 1 if a check fails.
    """
    findings = examine(kit, job)
    if participant_role(kit) == "person" and all(f.ok for f in findings if f.check == "server"):
        try:
            with connect(kit):
                findings.append(Finding("admission", "the server lets this person in"))
        except ConsiliumError as error:
            findings.append(
                Finding("admission", str(error).removeprefix(f"{kit}: "), "ask the hub for a renewed kit if it was revoked")
            )
    emit([f.to_dict() for f in findings], (Text(f.line(), "" if f.ok else "red") for f in findings), format)
    raise typer.Exit(0 if all(f.ok for f in findings) else 1)


def approve(
    job: Annotated[
        Path | None, typer.Argument(help="the job from the researcher, or the path that a refusal in the log names")
    ] = None,
    *,
    kit: Annotated[Path, typer.Option("--kit", help="the site's startup kit")],
    yes: Annotated[bool, typer.Option("--yes", help="approve without the question; needed where there is no terminal")] = False,
    listed: Annotated[bool, typer.Option("--list", help="list the approved jobs")] = False,
    revoke: Annotated[str, typer.Option(help="withdraw the approval of the digest that begins with this text")] = "",
    format: FormatOption = "txt",
) -> None:
    """Approve a job at a site with `approve: digest` in its site.yaml.

    Shows what the job would do here, what it would spend of the site's budget, what leaves, and whether the site would refuse
    it. Then it asks. Without `--yes`, nothing is approved before the answer y. Exit code 1 if the site would refuse the job.
    """
    if sum((job is not None, listed, bool(revoke))) != 1:
        raise ConfigError("JOB, --list, --revoke: give exactly one")
    local = kit / "local"
    if revoke:
        digest = approval.revoke(revoke, local)
        emit({"revoked": digest}, f"revoked: {digest}", format)
        return
    if job is None:
        found = approval.read_approvals(local)
        lines = [
            line
            for digest, one in found.items()
            for line in (f"{shown(one.get('job'))}: approved {shown(one.get('time'))} by {shown(one.get('by'))}", f"  {digest}")
        ]
        emit(found, lines or "nothing is approved", format)
        return
    with app_folder(job, plugins := plugins_allowed_by_kit(local)) as app:
        review = call("consilium.flare.kit.job_review:review", app, kit)
        if format == "txt":
            emit(None, review.lines(table_console().width), "txt")
        is_at_terminal = sys.stdin.isatty()
        if not yes and (format == "json" or not is_at_terminal):
            if format == "json":
                emit(review.to_dict() | {"approved": None}, "", format)
            why = "--format json asks no question" if is_at_terminal else "there is no terminal to ask at"
            raise ConfigError(f"{why}, so nothing is approved; repeat the command with --yes")
        agreed = yes or typer.confirm("Approve?", default=False)
        if agreed:
            approval.approve(app, local, plugins, review.digest)  # the digest of exactly the job that was shown
        text = f"approved; recorded in {local / approval.FILE}" if agreed else "not approved"
        if agreed and review.refusal:
            text += ". This site would refuse the job all the same, see REFUSED"
        emit(review.to_dict() | {"approved": review.digest}, text, "json" if format == "json" else "txt")
    raise typer.Exit(ExitCode.DONE if agreed and not review.refusal else ExitCode.FAILED)


@contextmanager
def app_folder(job: Path, plugins: Plugins) -> Iterator[Path]:
    """Yield the folder of a job's app. `job`: a job folder, an app folder, or a job.yaml, which is exported first.

    Raises ConfigError if there is no app, or several.
    """
    apps = [path for path in (job, *(job.iterdir() if job.is_dir() else ())) if (path / "config" / "job.yaml").is_file()]
    if len(apps) > 1:
        raise ConfigError(f"{job}: holds {len(apps)} apps; give the folder of the one that this site gets")
    if apps:
        yield apps[0]
        return
    with tempfile.TemporaryDirectory() as place:
        yield call("consilium.flare.job.recipe:export", job, Path(place), plugins=plugins) / "app"
