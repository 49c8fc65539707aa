"""The command `consilium audit`: shows a site's audit log, that is, all messages that left it, run by run."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from consilium.cli.options import find_site_records, is_site
from consilium.core.errors import ConfigError
from consilium.core.sanitize import markdown_cell, shown
from consilium.privacy.ledger.audit_log import FILE, read_with_epsilon
from consilium.report.audit_tables import message_and_tensor_tables, privacy_texts
from consilium.report.tables import markdown_text as markdown_of


def audit(
    where: Annotated[Path, typer.Argument(help="a site.yaml, a startup kit, a run's folder, or an audit.jsonl")],
    format: Annotated[
        Literal["md", "json"], typer.Option("--format", help="md: Markdown for people; json: for programs")
    ] = "md",
) -> None:
    """Show all messages that left this site: tensors, bytes, norms, noise, epsilon. Exit code 1 if a record was altered."""
    folder = find_site_records(where).root if is_site(where) else where
    records = (path for path in folder.rglob(FILE) if path.is_file())
    paths = sorted(records, key=lambda p: p.stat().st_mtime) if folder.is_dir() else [folder]
    if not paths or not all(path.is_file() for path in paths):
        raise ConfigError(f"{where}: no {FILE} there; give the site's site.yaml, its startup kit or a run's folder")
    found = [_read_record(path) for path in paths]
    print(json.dumps(found, indent=1) if format == "json" else "\n\n".join(map(_page, found)))
    raise typer.Exit(1 if any(one["broken_line"] for one in found) else 0)


def _read_record(path: Path) -> dict[str, Any]:
    """Return the record in an audit.jsonl. Raises ConfigError if it cannot be read."""
    try:
        return read_with_epsilon(path)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f"{path}: cannot be read as a record ({why}); give an audit.jsonl") from None


def _page(found: dict[str, Any]) -> str:
    """Return a record as a Markdown page. Raises ConfigError for a message of a form that no guard writes."""
    try:
        return markdown(found)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise ConfigError(
            f"{found['file']}: a message in it has not the form that a guard writes ({type(error).__name__}), so it was "
            "altered; look at it with --format json, and compare it with a copy"
        ) from None


def markdown(found: dict[str, Any]) -> str:
    """Return one run's record as a Markdown page."""
    messages = found["messages"]
    first = messages[0] if messages else {}
    site = first.get("site", "this site")
    damage = f"**altered: line {found['broken_line']} does not follow the one before it**"
    chain = damage if found["broken_line"] else "every line follows"
    # code, in which nothing needs an escape, so that the path can be copied
    file = markdown_cell(found["file"]) if "`" in found["file"] else f"`{shown(found['file'])}`"
    lines = [
        "# What left " + markdown_cell(f"{site}: {first.get('experiment') or first.get('job')}, run {first.get('run')}"),
        "",
        f"- record: {file} ({len(messages)} messages; {chain})",
        f"- seal: {found['seal']}",
        *(f"- {markdown_cell(text, 4000)}" for text in privacy_texts(messages)),
    ]
    tables = [one for one in message_and_tensor_tables(found, "", strict=True) if one is not None]
    return "\n".join([*lines, "", markdown_of(tables)])
