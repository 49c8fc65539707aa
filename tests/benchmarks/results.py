"""Makes the tables of RESULTS.md that come from studies.

    consilium study run claim_iat --workspace runs/studies/claim_iat
    python -m tests.benchmarks.results claim_iat --workspaces runs/studies

The named studies are read from their workspaces, one folder per study. The measures of finished cells go into `measured/`,
which stays when workspaces are deleted. Tables of `consilium compare` go between their marks in RESULTS.md. Then all other
tables and pictures are made from `measured/`. Without a study's name only this last step runs.
An effect is a difference, paired by seed, with its 95 % t interval over seeds. `effects` lists them, with the expected side of
0. `claims` lists the papers' claims with the effects that decide them.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from scipy import stats

from consilium.study.definition import load
from tests.benchmarks import utility
from tests.benchmarks.claims import CLAIMS, Claim
from tests.benchmarks.effects import EFFECTS, Best, Effect, Labels, Term
from tests.benchmarks.measured import FOLDER, MEASURE, NOISE, Rows, collected, keep, read

PAGE = Path(__file__).parent / "RESULTS.md"
BLOCK = re.compile(r"<!-- made by results: (?P<kind>\w+)(?: (?P<study>\w+))? -->\n(?P<text>.*?)<!-- end -->\n", re.DOTALL)
COMPARE = "compare"
FEWEST = 3
"""The fewest seeds whose interval gets a verdict."""
NAMED = 5
"""The most effects without cells that a table names."""
SHOWN, NOT_SHOWN, CONTAINS = "shown", "not shown", "contains 0"
VERDICTS = {
    "above 0": (SHOWN, "**opposite: below 0**"),
    "below 0": ("**opposite: above 0**", SHOWN),
    "0": ("**differs: above 0**", "**differs: below 0**"),
}
"""The verdicts of an interval above 0 and of one below 0, by the expected side."""


def by_seed(rows: Rows, measure: str, wanted: Labels) -> dict[str, float]:
    """Return a measure by seed, of the cells with these labels: one cell per seed."""
    fit = [(dict(key), value) for key, value in rows.items()]
    found = [(one["seed"], value) for one, value in fit if one[MEASURE] == measure and wanted.items() <= one.items()]
    assert len(dict(found)) == len(found), f"{wanted} leaves several cells for a seed"
    return dict(found)


def chosen(rows: Rows, measure: str, term: Term) -> Labels:
    """Return the labels of a term's cells. Of several choices it is the one with the highest mean; missing ones come last."""
    if not isinstance(term, Best):
        return term
    return max(term.of, key=lambda one: np.mean([*by_seed(rows, measure, one).values()] or [-np.inf]))


def differences(rows: Rows, effect: Effect) -> dict[str, float]:
    """Return the effect by seed, for the seeds that have all its cells."""
    sides = ([chosen(rows, effect.measure, one) for one in terms] for terms in (effect.plus, effect.minus))
    plus, minus = ([by_seed(rows, effect.measure, one) for one in terms] for terms in sides)
    counted = sorted(set.intersection(*(set(one) for one in [*plus, *minus])), key=lambda seed: (len(seed), seed))
    return {seed: sum(one[seed] for one in plus) - sum(one[seed] for one in minus) - effect.level for seed in counted}


def interval(values: Mapping[str, float]) -> tuple[float, float]:
    """Return the mean and half the width of its 95 % t interval, which is infinite for one seed."""
    n = len(values)
    spread = np.std([*values.values()], ddof=1) / n**0.5 if n > 1 else np.inf
    return float(np.mean([*values.values()])), float(stats.t.ppf(0.975, max(n - 1, 1)) * spread)


def verdict(effect: Effect, mean: float, half: float, seeds: int) -> str:
    """Return the verdict: whether the interval lies on the expected side."""
    if seeds < FEWEST:
        return "too few seeds"
    if abs(mean) <= half:
        return CONTAINS if effect.expect == "0" else NOT_SHOWN
    return VERDICTS[effect.expect][0 if mean > 0 else 1]


def about(rows: Rows, effect: Effect) -> str:
    """Return the effect's description, with the chosen cells where it takes the best of several."""
    return effect.name + (f" ({picked})" if (picked := best_cells(rows, effect)) else "")


def best_cells(rows: Rows, effect: Effect) -> str:
    """Return the names of the chosen cells where an effect takes the best of several; empty elsewhere."""
    best = [(one, chosen(rows, effect.measure, one)) for one in (*effect.plus, *effect.minus) if isinstance(one, Best)]
    return ", ".join(v for term, label in best for k, v in label.items() if any(o[k] != v for o in term.of))


def row(rows: Rows, effect: Effect) -> list[str]:
    """Return the cells of an effect's row, in the order of HEADINGS."""
    found = differences(rows, effect)
    mean, half = interval(found)
    first = by_seed(rows, effect.measure, chosen(rows, effect.measure, effect.plus[0]))
    size = f"{mean:+.3f} ± {half:.3f}" if np.isfinite(half) else f"{mean:+.3f}"
    above = f"{sum(value > 0 for value in found.values())} of {len(found)}"
    value = f"{np.mean([first[seed] for seed in found]):.3f}"
    return [about(rows, effect), value, size, above, effect.expect, verdict(effect, mean, half, len(found))]


def _table(headings: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in (headings, ["---"] * len(headings), *lines))


def effects_by_column(rows: Rows, found: list[Effect]) -> str:
    """Return a table of effects: a row per description, and in its columns the first term, difference, result and seeds."""
    columns, expect = list(dict.fromkeys(one.column for one in found)), found[0].expect
    lines: dict[str, dict[str, str]] = {}
    for one in found:
        _, first, size, above, _, result = row(rows, one)
        best = f" [{picked}]" if (picked := best_cells(rows, one)) else ""
        lines.setdefault(one.about, {})[one.column] = f"{first}{best}: {size}, {result} ({above})"
    sides = {about: {one.expect for one in found if one.about == about} for about in lines}
    named = {about: about if expect in side else f"{about} (expected {', '.join(side)})" for about, side in sides.items()}
    filled = ([named[about], *(cells.get(column, "-") for column in columns)] for about, cells in lines.items())
    return _table([f"effect (expected {expect})", *columns], filled)


HEADINGS = ("effect", "first term", "difference", "seeds above 0", "expected", "result")


def effects(study: str, folder: Path = FOLDER) -> str:
    """Return the tables of a study's effects, and the effects that have no cells."""
    rows = read(study, folder)
    ran = [one for one in EFFECTS[study] if differences(rows, one)]
    in_columns = [one for one in ran if one.column]
    parts = [effects_by_column(rows, in_columns)] if in_columns else []
    parts += [_table(HEADINGS, (row(rows, one) for one in ran if not one.column))] if len(in_columns) < len(ran) else []
    absent = [one.name for one in EFFECTS[study] if one not in ran]
    more = f"; and {len(absent) - NAMED} more" if len(absent) > NAMED else ""
    return "\n".join([*parts, *([f"Did not run: {'; '.join(absent[:NAMED])}{more}.\n"] if absent else [])])


def claimed(claim: Claim, folder: Path = FOLDER) -> list[str]:
    """Return a claim's row: the claim, the verdict, its effects with intervals, and the number of seeds."""
    rows, named = read(claim.study, folder), {one.name: one for one in EFFECTS[claim.study]}
    parts = {name: row(rows, named[about]) for name, about in claim.by.items()}
    shown = [part[-1] for part in parts.values()]
    agree = [one in (SHOWN, CONTAINS) for one in shown]
    word = SHOWN if all(agree) else "partly shown" if any(agree) else NOT_SHOWN
    sizes = "; ".join(f"{name} {part[2]}" for name, part in parts.items())
    seeds = ", ".join(sorted({part[3].split()[-1] for part in parts.values()}))
    return [claim.text, f"**{word}**{f': {claim.found}' if claim.found else ''}", sizes, seeds]


def claims(folder: Path = FOLDER) -> str:
    """Return the table of the papers' claims."""
    return _table(("claim", "result", "effects", "seeds"), (claimed(one, folder) for one in CLAIMS))


def compared(study: str, workspace: Path) -> str:
    """Return the first table of `consilium compare`, without its legend."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "table.md")
        command = [Path(sys.executable).parent / "consilium", "compare", study, "--workspace", workspace, "-o", path]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        page = path.read_text()
    first = page[page.index("### ") :]
    end = first.find("\n### ", 1)
    title, rest = (first if end < 0 else first[:end]).split("\n", 1)
    table = [line for line in rest.splitlines() if line.startswith("|")]
    return f"{title.removeprefix('### ')}:\n\n" + "".join(f"{line}\n" for line in table)


MADE: dict[str, Callable[[str, Path], str]] = {
    "claims": lambda _, folder: claims(folder),
    "effects": effects,
    "utility": lambda study, folder: utility.table(read(study, folder), utility.SCORES[study]),
}
"""The function that makes a block from `measured/`, by the kind of block."""


def renewed(page: str, workspaces: Path | None, studies: list[str], folder: Path = FOLDER) -> str:
    """Return the page with new blocks: all that `measured/` makes, and the comparisons of `studies`."""

    def block(match: re.Match[str]) -> str:
        kind, study, text = match["kind"], match["study"], match["text"]
        if kind in MADE:
            text = MADE[kind](study, folder)
        elif kind == COMPARE:
            text = compared(study, workspaces / study) if workspaces is not None and study in studies else text
        else:
            raise SystemExit(f"{PAGE.name}: {match.group().splitlines()[0]}: write one of {', '.join([*MADE, COMPARE])}")
        return f"{match.group().splitlines()[0]}\n{text}<!-- end -->\n"

    return BLOCK.sub(block, page)


def main() -> None:
    """Collect the named studies, and make the page's tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="*", help=f"one or more of {', '.join(EFFECTS)}")
    parser.add_argument("--workspaces", type=Path, default=Path("runs/studies"), help="the folder with a workspace per study")
    args = parser.parse_args()
    for study in args.studies:
        wanted: dict[str, list[Labels]] = {}
        for one in EFFECTS[study]:
            wanted.setdefault(one.measure, []).extend(one.cells)
        if study in utility.SCORES:
            wanted |= {measure: [{}] for measure in (utility.SCORES[study], NOISE)}
        keep(study, collected(load(study, workspace=args.workspaces / study).cells(), wanted))
    PAGE.write_text(renewed(PAGE.read_text(), args.workspaces, args.studies))
    for study, name in utility.PICTURES.items():
        utility.picture(read(study)).savefig(PAGE.parent / name, dpi=150, metadata={"Software": None})


if __name__ == "__main__":
    main()
