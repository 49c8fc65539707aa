"""The tables of RESULTS.md that come from studies: nobody types them.

    consilium study run claim_iat --workspace runs/studies/claim_iat
    python -m tests.benchmarks.results claim_iat --workspaces runs/studies

The studies named are read from their workspaces (a folder each): what finished cells measured goes into `measured/`, and
what `consilium compare` says of the study between its marks in RESULTS.md. Then the tables of effects are made of all of
`measured/`, which lasts when workspaces are gone, and so are the tables and pictures of `utility`. Without a study's name only
these are made. The first table has the papers' claims with the effects that decide them (`claims`).
An effect is a difference, paired by seed, with the 95 % t interval over seeds; `effects` says which, and where each should lie.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from scipy import stats

from consilium.study.study import load
from tests.benchmarks import utility
from tests.benchmarks.claims import CLAIMS, Claim
from tests.benchmarks.effects import EFFECTS, LOSS, Best, Effect, Labels, Term
from tests.benchmarks.measured import FOLDER, MEASURE, NOISE, SECONDS, Rows, collected, keep, read

PAGE = Path(__file__).parent / "RESULTS.md"
BLOCK = re.compile(r"<!-- made by results: (?P<kind>\w+)(?: (?P<study>\w+))? -->\n(?P<text>.*?)<!-- end -->\n", re.DOTALL)
TABLES = {"compare": "", "costs": "Costs"}
"""How the title of compare's table begins, by kind of block."""
FEWEST = 3
"""Seeds that make an interval worth a verdict."""
NAMED = 5
"""Effects without cells that are named, at most."""
VERDICTS = {
    "over 0": ("yes", "**no: under 0**"),
    "under 0": ("**no: over 0**", "yes"),
    "0": ("**no: over 0**", "**no: under 0**"),
}
"""What an interval over 0, and one under it, says of what was expected."""


def by_seed(rows: Rows, measure: str, wanted: Labels) -> dict[str, float]:
    """Return a measure by seed, of the cells with these labels, one for a seed."""
    fit = [(dict(key), value) for key, value in rows.items()]
    found = [(one["seed"], value) for one, value in fit if one[MEASURE] == measure and wanted.items() <= one.items()]
    assert len(dict(found)) == len(found), f"{wanted} leaves several cells for a seed"
    return dict(found)


def chosen(rows: Rows, measure: str, term: Term) -> Labels:
    """Return the cells of a term: of several the one with the highest mean, a missing one last."""
    if not isinstance(term, Best):
        return term
    return max(term.of, key=lambda one: np.mean([*by_seed(rows, measure, one).values()] or [-np.inf]))


def differences(rows: Rows, effect: Effect) -> dict[str, float]:
    """Return the effect by seed, of the seeds that have all its cells."""
    sides = ([chosen(rows, effect.measure, one) for one in terms] for terms in (effect.plus, effect.minus))
    plus, minus = ([by_seed(rows, effect.measure, one) for one in terms] for terms in sides)
    counted = sorted(set.intersection(*(set(one) for one in [*plus, *minus])), key=lambda seed: (len(seed), seed))
    return {seed: sum(one[seed] for one in plus) - sum(one[seed] for one in minus) - effect.level for seed in counted}


def interval(values: Mapping[str, float]) -> tuple[float, float]:
    """Return the mean and half the width of its 95 % t interval; infinity for one seed."""
    n = len(values)
    spread = np.std([*values.values()], ddof=1) / n**0.5 if n > 1 else np.inf
    return float(np.mean([*values.values()])), float(stats.t.ppf(0.975, max(n - 1, 1)) * spread)


def verdict(effect: Effect, mean: float, half: float, seeds: int) -> str:
    """Return in a word whether the interval lies where it should."""
    if seeds < FEWEST:
        return "too few seeds"
    if abs(mean) <= half:
        return "yes" if effect.expect == "0" else "not shown"
    return VERDICTS[effect.expect][0 if mean > 0 else 1]


def about(rows: Rows, effect: Effect) -> str:
    """Return what an effect is of, and which cells were the best where it says so."""
    best = [(one, chosen(rows, effect.measure, one)) for one in (*effect.plus, *effect.minus) if isinstance(one, Best)]
    picked = [", ".join(v for k, v in label.items() if any(o[k] != v for o in term.of)) for term, label in best]
    return effect.about + (f" ({', '.join(picked)})" if picked else "")


def row(rows: Rows, effect: Effect) -> list[str]:
    """Return an effect's row: what, first value, difference, by seed, how many, what should be, whether it is."""
    found = differences(rows, effect)
    mean, half = interval(found)
    first = by_seed(rows, effect.measure, chosen(rows, effect.measure, effect.plus[0]))
    size = f"{mean:+.3f} ± {half:.3f}" if np.isfinite(half) else f"{mean:+.3f}"
    each = " ".join(f"{value:+.3f}" for value in found.values())
    value = f"{np.mean([first[seed] for seed in found]):.3f}"
    return [about(rows, effect), value, size, each, str(len(found)), effect.expect, verdict(effect, mean, half, len(found))]


def means(study: str, folder: Path = FOLDER) -> str:
    """Return a row for each cell but for its seed, the best method first: the score that the study's first effect is of."""
    measure, found = EFFECTS[study][0].measure, dict[tuple[tuple[str, str], ...], list[float]]()
    for key, value in sorted(read(study, folder).items()):
        if (MEASURE, measure) in key:
            found.setdefault(tuple(one for one in key if one[0] not in ("seed", MEASURE)), []).append(value)
    sign = 1 if measure == LOSS else -1
    order = sorted(found, key=lambda one: ([label for name, label in one if name != "method"], sign * np.mean(found[one])))
    headings = [*dict(order[0]), measure.rpartition("/")[-1], "by seed"]
    lines = [headings, ["---"] * len(headings), *([*dict(one).values(), *_seeds(found[one])] for one in order)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _seeds(values: list[float]) -> list[str]:
    return [f"{np.mean(values):.3f}", " ".join(f"{value:.3f}" for value in values)]


HEADINGS = ("effect", "first value", "difference", "by seed", "seeds", "should be", "is it so")


def effects(study: str, folder: Path = FOLDER) -> str:
    """Return the table of a study's effects, what its cells took, and the effects that have no cells."""
    rows = read(study, folder)
    ran = [one for one in EFFECTS[study] if differences(rows, one)]
    lines = [HEADINGS, ("---",) * len(HEADINGS), *(row(rows, one) for one in ran)] if ran else []
    seconds = [value for key, value in rows.items() if dict(key)[MEASURE] == SECONDS]
    parts = ["\n".join(f"| {' | '.join(line)} |" for line in lines)] if ran else []
    parts += [f"{len(seconds)} cells, median {np.median(seconds):.0f} s on cores shared with other work."] if seconds else []
    absent = [one.about for one in EFFECTS[study] if one not in ran]
    more = f"; and {len(absent) - NAMED} more" if len(absent) > NAMED else ""
    return "\n\n".join([*parts, *([f"Did not run: {'; '.join(absent[:NAMED])}{more}."] if absent else [])]) + "\n"


def claimed(claim: Claim, folder: Path = FOLDER) -> list[str]:
    """Return a claim's row: what, whether it holds, and each effect that says so with its interval and seeds."""
    rows, named = read(claim.study, folder), {one.about: one for one in EFFECTS[claim.study]}
    parts = {name: row(rows, named[about]) for name, about in claim.by.items()}
    shown = [part[-1] for part in parts.values()]
    word = "holds" if set(shown) == {"yes"} else "only in part" if "yes" in shown else "not shown"
    sizes = "; ".join(f"{name} {part[2]}" for name, part in parts.items())
    seeds = ", ".join(sorted({part[4] for part in parts.values()}))
    return [claim.text, f"**{word}**{f': {claim.found}' if claim.found else ''}", sizes, seeds]


def claims(folder: Path = FOLDER) -> str:
    """Return the table of the papers' claims."""
    lines = [("claim", "is it so", "effect", "seeds"), ("---",) * 4, *(claimed(one, folder) for one in CLAIMS)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def compared(study: str, workspace: Path, titled: str = "") -> str:
    """Return a table that `consilium compare` makes of a study, by how its title begins: the first, of scores, without one."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "table.md")
        command = [Path(sys.executable).parent / "consilium", "compare", study, "--workspace", workspace, "-o", path]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        page = path.read_text()
    first = page[page.index(f"### {titled}") :]
    end = first.find("\n### ", 1)
    title, rest = (first if end < 0 else first[:end]).split("\n", 1)
    return f"{title.removeprefix('### ')}:\n{rest.rstrip()}\n"


MADE: dict[str, Callable[[str, Path], str]] = {
    "claims": lambda _, folder: claims(folder),
    "effects": effects,
    "means": means,
    "utility": lambda study, folder: utility.table(read(study, folder), utility.SCORES[study]),
}
"""What makes a block of what was measured, by its kind."""


def renewed(page: str, workspaces: Path | None, studies: list[str], folder: Path = FOLDER) -> str:
    """Return the page with its blocks made anew: all effects, and the comparisons of these studies."""

    def block(match: re.Match[str]) -> str:
        kind, study, text = match["kind"], match["study"], match["text"]
        if kind in MADE:
            text = MADE[kind](study, folder)
        elif kind in TABLES:
            text = compared(study, workspaces / study, TABLES[kind]) if workspaces is not None and study in studies else text
        else:
            raise SystemExit(f"{PAGE.name}: {match.group().splitlines()[0]}: write one of {', '.join([*MADE, *TABLES])}")
        return f"{match.group().splitlines()[0]}\n{text}<!-- end -->\n"

    return BLOCK.sub(block, page)


def main() -> None:
    """Collect the studies named, and make the page's tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="*", help=f"of {', '.join(EFFECTS)}")
    parser.add_argument("--workspaces", type=Path, default=Path("runs/studies"), help="a folder of each study's workspace")
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
