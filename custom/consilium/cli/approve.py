"""The command `consilium approve`: a site's administrator reviews a job and records the approval."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from consilium.cli.options import Format, FormatOption
from consilium.client import approval
from consilium.client.approval import JOB, other_files
from consilium.config.code_digest import plugins_of
from consilium.config.job import load_job
from consilium.config.site import kit_plugins
from consilium.core.errors import ConfigError
from consilium.core.registry import Plugins
from consilium.federation.job import assemble_job
from consilium.flare.job.recipe import export
from consilium.strategies.strategy import Role


def approve(
    job: Annotated[
        Path | None, typer.Argument(help="as the researcher hands it over, or as a refusal in the log names it")
    ] = None,
    *,
    kit: Annotated[Path, typer.Option("--kit", help="the site's startup kit")],
    listed: Annotated[bool, typer.Option("--list", help="show what is approved")] = False,
    revoke: Annotated[str, typer.Option(help="take back the approval of the digest that begins so")] = "",
    format: FormatOption = Format.TXT,
) -> None:
    """Approve a job for a site with `approve: digest` in its site.yaml. Prints the job's settings and what leaves the site."""
    if sum((job is not None, listed, bool(revoke))) != 1:
        raise ConfigError("JOB, --list, --revoke: give exactly one")
    found = _done(job, revoke, kit / "local")
    print(json.dumps(found, indent=1) if format is Format.JSON else _text(found))


def _done(job: Path | None, revoke: str, local: Path) -> dict[str, Any]:
    if job is not None:
        plugins = kit_plugins(local)
        with app_of(job, plugins) as app:
            return summary(app, plugins) | {"approved": approval.approve(app, local, plugins)}
    return {"revoked": approval.revoke(revoke, local)} if revoke else approval.approvals(local)


@contextmanager
def app_of(job: Path, plugins: Plugins) -> Iterator[Path]:
    """Yield the app folder of a job folder, of an app folder itself, or of the job exported from a job.yaml.

    Raises ConfigError for none, or for several apps.
    """
    apps = [path for path in (job, *(job.iterdir() if job.is_dir() else ())) if (path / "config" / "job.yaml").is_file()]
    if len(apps) > 1:
        raise ConfigError(f"{job}: holds {len(apps)} apps; give the folder of the one that this site gets")
    if apps:
        yield apps[0]
        return
    with tempfile.TemporaryDirectory() as place:
        yield export(job, Path(place), plugins=plugins) / "app"


def summary(app: Path, plugins: Plugins) -> dict[str, Any]:
    """Return the settings of a job to review before approval. Raises ConfigError if it cannot run."""
    config = load_job(app / JOB, plugins=plugins)
    job = assemble_job(config, app / JOB)
    found = config.model_dump(mode="json", exclude_none=True)
    shown = {
        key: found.get(key)
        for key in ("name", "strategy", "model", "adapter", "task", "data", "training", "privacy", "statistics", "cross_site")
    }
    shown |= {"packages": config.packages, "code of packages": plugins_of(config)} if config.packages else {}
    return shown | {"leaves": _leaves(job), "other files": other_files(app)}


def _leaves(job: Any) -> dict[str, Any]:
    """Return the tensors that a site sends over all phases, the most numbers of a phase, and statistics, if asked for."""
    strategy, initial = job.strategy, job.initial
    rounds = job.config.training.rounds if job.config.trains else 0
    places = [place for place in strategy.traits.role_schedule() if place[0] < rounds]
    sent = [strategy.names(initial, Role.SHARED, *place) for place in places]
    numbers = max((sum(initial[name].numel() for name in names) for names in sent), default=0)
    found = {"tensors": len({name for names in sent for name in names}), "numbers a phase": numbers}
    section = job.config.statistics
    if (asked := job.config.cross_site) and asked.personalized:
        found |= {
            "this site's own model, where site.yaml says share_personalized": sum(one.numel() for one in initial.values())
        }
    return found | ({"counts, once, of so many patients or more": section.minimum} if section else {})


def _text(found: dict[str, Any]) -> str:
    """Return a line per value, as ASCII JSON because the values are not trusted."""
    return "\n".join(f"{key}: {json.dumps(value)}" for key, value in found.items()) or "nothing is approved"
