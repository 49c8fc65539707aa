"""The command `consilium audit`: shows a site's audit log, that is, all messages that left it, run by run."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from consilium.cli.find_site_records import find_site_records, is_site
from consilium.core.errors import ConfigError
from consilium.core.sanitize import markdown_cell, shown
from consilium.privacy.accounting import VOID
from consilium.privacy.audit_log import FILE, is_void, read_with_epsilon
from consilium.report.audit_tables import message_and_tensor_tables
from consilium.report.tables import markdown_text as markdown_of, only_true


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
    lines = [
        "# What left " + markdown_cell(f"{site}: {first.get('experiment') or first.get('job')}, run {first.get('run')}"),
        "",
        f"- record: {_code_span(found['file'])} ({len(messages)} messages; {chain})",
        f"- seal: {found['seal']}",
        *_privacy_lines(messages),
    ]
    tables = [one for one in message_and_tensor_tables(found, "", strict=True) if one is not None]
    return "\n".join([*lines, "", markdown_of(tables)])


def _code_span(path: str) -> str:
    """Return a path as Markdown code, in which nothing needs an escape, so that it can be copied."""
    return f"`{shown(path)}`" if "`" not in path else markdown_cell(path)


def _privacy_lines(messages: list[dict[str, Any]]) -> list[str]:
    """Return the lines on the privacy guarantee, or on its absence."""
    private = [m["privacy"] for m in messages if "privacy" in m]
    if not private:
        left = [m for m in messages if m.get("tensors")]
        if not left:
            return ["- privacy: no update and no model left"]
        if not all("masked" in message for message in left):
            return ["- privacy: none; updates left as trained"]
        sets = sorted({tuple(sites) for message in left if (sites := message["masked"].get("sites"))})
        named = "; summed with: " + " | ".join(markdown_cell(", ".join(one)) for one in sets) if sets else ""
        why = "which hide within this run; over many runs only noise protects"
        return [f"- privacy: no noise; updates left under masks, {why}{named}"]
    last = private[-1]
    named = f"{markdown_cell(last['unit'])} level, {markdown_cell(last['adjacency'])}, trust {markdown_cell(last['trust'])}"
    noise = f"clip {last['clip']:g}, noise multiplier {last['noise_multiplier']:.4g}"
    seeded, void = sum(bool(one.get("seeded")) for one in private), sum(map(is_void, private))
    lines = {
        f"- privacy: epsilon {last['epsilon']:.4g} at delta {last['delta']:g} so far in this run ({named}; {noise})": True,
        f"- **NOT PRIVATE: the noise of {seeded} messages came from a seed (noise_seed in site.yaml)**": seeded,
        f"- **{void} messages are {VOID}**": void,
    }
    return only_true(lines)
