"""The settings of the papers' jobs, theirs and ours, as tables of jobs/papers.md. `python -m tests.tools.papers` writes them.

Each such job.yaml begins with two blocks of comments. A line is a field, its value, and where the paper says so; or, of ours,
what the paper has in its place ("theirs: ...;") and why.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from consilium.core.storage import write_atomic

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "jobs" / "papers.md"
_HEAD = re.compile(r"# From the paper \((?P<paper>.+)\):|# (?P<ours>Ours):")
_LINE = re.compile(r"#   (?P<field>[a-z_.]+): (?P<value>[^|]+?) \| (?P<why>.+)")


@dataclass(frozen=True)
class Mark:
    """A setting of a job: the paper's, with the place where it is printed, or `ours`, with the reason."""

    paper: str
    field: str
    value: str
    ours: bool
    why: str

    @property
    def row(self) -> tuple[str, str, str, str]:
        """Return setting, theirs, ours, and where or why."""
        if not self.ours:
            return self.field, self.value, self.value, self.why
        theirs, _, reason = self.why.removeprefix("theirs: ").partition("; ")
        if not self.why.startswith("theirs: "):
            theirs, reason = "not printed", self.why.removeprefix("not printed").lstrip("; ")
        return self.field, theirs, self.value, reason


def marks(job: Path) -> list[Mark]:
    """Return the marks of a job.yaml, in its order; [] for a job of no paper."""
    found, paper, ours = list[Mark](), "", False
    for line in job.read_text(encoding="utf-8").splitlines():
        if head := _HEAD.fullmatch(line):
            paper, ours = head["paper"] or paper, bool(head["ours"])
        elif paper and (one := _LINE.fullmatch(line)):
            found.append(Mark(paper, one["field"], one["value"], ours, one["why"]))
    return found


def of_jobs() -> dict[str, list[Mark]]:
    """Return the marks of every job that has some, by the job's name."""
    paths = {path.parents[2].name: path for path in sorted((ROOT / "jobs").glob("*/app/config/job.yaml"))}
    return {name: found for name, path in paths.items() if (found := marks(path))}


def table(paper: str) -> str:
    """Return a paper's settings: by the place that prints them, then ours that differ or have a reason, then the rest of ours.

    A setting that not all of the paper's jobs have names those that do.
    """
    jobs = {name: found for name, found in of_jobs().items() if found[0].paper == paper}
    rows: dict[Mark, list[str]] = {}
    for name, found in jobs.items():
        for mark in found:
            rows.setdefault(mark, []).append(name)
    printed, reasons, rest = dict[str, list[str]](), list[str](), list[str]()
    for mark, names in sorted(rows.items(), key=lambda one: one[0].field.partition(".")[0]):
        of = "" if len(names) == len(jobs) else f" ({', '.join(f'`{name}`' for name in names)})"
        field, theirs, ours, why = mark.row
        if not mark.ours:
            printed.setdefault(why, []).append(f"`{field}: {ours}`{of}")
        elif theirs == "not printed" and not why:
            rest.append(f"`{field}: {ours}`{of}")
        else:
            reasons.append(f"| `{field}: {ours}`{of} | {theirs} | {why} |")
    lines = ["| where the paper prints it | setting |", "|---|---|"]
    lines += [f"| {where} | {', '.join(settings)} |" for where, settings in printed.items()]
    lines += ["", "| ours | theirs | why |", "|---|---|---|", *reasons]
    return "\n".join([*lines, f"| {', '.join(rest)} | not printed | |"])


def rewritten(page: str) -> str:
    """Return the page with its tables of settings made anew."""

    def made(match: re.Match[str]) -> str:
        return f"{match[1]}\n{table(match['paper'])}\n{match[3]}"

    return re.sub(r"(<!-- settings of (?P<paper>[^\n]+) -->)\n.*?(<!-- end -->)", made, page, flags=re.DOTALL)


def papers() -> Iterator[str]:
    """Yield the papers of which there are jobs, each once."""
    yield from dict.fromkeys(found[0].paper for found in of_jobs().values())


if __name__ == "__main__":
    write_atomic(PAGE, rewritten(PAGE.read_text(encoding="utf-8")).encode())
