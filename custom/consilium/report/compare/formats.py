"""Tables of a comparison as Markdown, LaTeX, CSV, JSON and for a terminal. Names are text in each: nothing in one is markup."""

import csv
import io
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE
from rich.cells import cell_len
from rich.console import Group as Lines
from rich.table import Table as Grid
from rich.text import Text

from consilium.messages import Stage
from consilium.report.clean import cell, harmless, line, shown
from consilium.report.compare.groups import Group
from consilium.report.compare.runs import Run, known
from consilium.report.compare.sheets import Sheet
from consilium.report.tables import needed, shortened
from consilium.tasks.registry import COUNT, HIGH, LOW

ROW = ("group", "method", "seed", "site", "model", "split", "metric", "value", "low", "high", "n",
       "bytes", "seconds", "epsilon", "run")  # fmt: skip
NARROW = 14
"""Cells of a heading in a terminal, at most."""
ROOMS, SHORTEST = (48, 36, 28, 22), 18
"""Cells of a name in a terminal that has too little room, tried in turn; under SHORTEST only when no column is left to drop."""
_TEX = {c: f"\\{c}" for c in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "–": "--",
    "±": r"$\pm$",
    "…": r"\ldots{}",
}
"""How LaTeX prints a character that it would read."""
_SMALL = "alpha beta gamma delta varepsilon zeta eta theta iota kappa lambda mu nu xi o pi rho varsigma sigma tau upsilon "
_SMALL += "varphi chi psi omega"
_LARGE = "A B Gamma Delta E Z H Theta I K Lambda M N Xi O Pi P - Sigma T Upsilon Phi X Psi Omega"
_SIGNS = {"≥": "geq", "≤": "leq", "≠": "neq", "≈": "approx", "∼": "sim", "≪": "ll", "≫": "gg", "∞": "infty", "∈": "in",
          "→": "rightarrow", "←": "leftarrow", "↔": "leftrightarrow", "⇒": "Rightarrow", "↑": "uparrow", "↓": "downarrow",
          "ϵ": "epsilon", "ϕ": "phi", "ϑ": "vartheta", "×": "times", "√": "surd", "∆": "Delta", "∑": "sum"}  # fmt: skip
_GREEK = {chr(first + i): n for first, names in ((0x3B1, _SMALL), (0x391, _LARGE)) for i, n in enumerate(names.split())}
_TEX |= {c: rf"$\{name}$" if len(name) > 1 else name for c, name in (_GREEK | _SIGNS).items()} | {"−": "$-$"}
_QUIET = frozenset("‘’“”„‚–—†‡•‰€™")
"""Beside Latin letters, which end at U+017F, what pdfLaTeX prints with T1 and textcomp."""


def markdown(sheets: Sequence[Sheet], notes: Sequence[str] = ()) -> str:
    """Return a page; the best of a column is bold."""
    parts = [f"- {cell(note, 2000)}" for note in notes]
    parts += [""] if notes else []
    for sheet in sheets:
        parts += [f"### {cell(sheet.title)}", "", _line([c.heading for c in sheet.columns])]
        parts.append("|" + "|".join("--:" if c.right else "---" for c in sheet.columns) + "|")
        parts += [_line(row, {c for r, c in sheet.best if r == index}) for index, row in enumerate(sheet.rows)]
        parts += ["", *(f"{cell(note, 2000)}.  " for note in sheet.notes), ""]
    return "\n".join(parts).rstrip() + "\n"


def _line(cells: Sequence[str], bold: set[int] | frozenset[int] = frozenset()) -> str:
    return "| " + " | ".join(f"**{cell(c)}**" if i in bold else cell(c) for i, c in enumerate(cells)) + " |"


def latex(sheets: Sequence[Sheet], notes: Sequence[str] = ()) -> str:
    """Return a table environment per sheet; the first line says which packages they need, and which engine."""
    parts: list[str] = []
    for sheet in sheets:
        rows = [_tex_row(row, {c for r, c in sheet.best if r == index}) for index, row in enumerate(sheet.rows)]
        body = [_tex_row([c.heading for c in sheet.columns]), r"\midrule", *rows]
        align = "".join("r" if c.right else "l" for c in sheet.columns)
        tabular = [rf"\begin{{tabular}}{{{align}}}", r"\toprule", *body, r"\bottomrule", r"\end{tabular}"]
        wide = len(sheet.columns) > 7
        tabular = [r"\resizebox{\textwidth}{!}{%", *tabular, "}"] if wide else tabular
        caption = tex(". ".join([sheet.title, *sheet.notes]))
        parts += [r"\begin{table}[t]", r"\centering", rf"\caption{{{caption}.}}", *tabular, r"\end{table}", ""]
    return "\n".join([*(f"% {shown(note, 2000)}" for note in notes), *_tex_needs("".join(parts)), *parts])


def _tex_needs(body: str) -> list[str]:
    """Return what must be loaded, and that pdfLaTeX will not do where a letter is left that it does not know."""
    left = "".join(sorted({c for c in body if ord(c) > 0x17F and c not in _QUIET}))
    found = ["% needs: booktabs, graphicx, textcomp, fontenc with T1"]
    return found + ([f"% needs: XeLaTeX or LuaLaTeX in place of pdfLaTeX, and a font that has {left[:40]}"] if left else [])


def _tex_row(cells: Sequence[str], bold: set[int] | frozenset[int] = frozenset()) -> str:
    row = " & ".join(rf"\textbf{{{tex(c)}}}" if i in bold else tex(c) for i, c in enumerate(cells)) + r" \\"
    return "{}" + row if row.startswith(("[", "*")) else row  # else an option of the line before


def tex(text: str) -> str:
    """Return a text that LaTeX prints as it is."""
    return "".join(_TEX.get(c, c) for c in shown(text, 2000))


def records(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return a row per run, site, model and score: all that tables and tests are made of. What is missing is None."""
    found = []
    for group in groups:
        for (method, seed), run in group.runs.items():
            whole = {"bytes": _count(run.bytes), "seconds": run.seconds, "epsilon": run.epsilon, "run": run.name}
            names = {"group": group.name, "method": method, "seed": seed}
            for site in sorted(run.sites):
                found += [names | one | whole for one in _scores(run, site)]
    return found


def _scores(run: Run, site: str) -> list[dict[str, Any]]:
    metrics = [m for m in dict.fromkeys([run.metric, *run.scores.leading, *run.scores.beside])]
    found = []
    for stage in Stage:
        for metric in metrics:
            value = run.score(site, stage, metric)
            if value is not None:
                ends = {end.strip("_"): known(run.score(site, stage, f"{metric}{end}")) for end in (LOW, HIGH)}
                place: dict[str, Any] = {"site": site, "model": str(stage), "split": run.split, "metric": metric}
                found.append(place | {"value": known(value), "n": _count(run.score(site, stage, COUNT))} | ends)
    return found


def _count(value: float | None) -> float | None:
    """Return a number of things as a whole one."""
    return value if value is None or not float(value).is_integer() else int(value)


def as_csv(groups: Sequence[Group]) -> str:
    """Return the records as CSV. A text that a spreadsheet would take for a formula begins with an apostrophe."""
    file = io.StringIO()
    writer = csv.DictWriter(file, ROW, lineterminator="\n")
    writer.writeheader()
    for one in records(groups):
        writer.writerow({key: harmless(one.get(key)) for key in ROW})
    return file.getvalue()


def as_json(groups: Sequence[Group], sheets: Sequence[Sheet], notes: Sequence[str]) -> str:
    """Return records, tables and notes."""
    tables = [asdict(sheet) | {"columns": [c.heading for c in sheet.columns], "best": sorted(sheet.best)} for sheet in sheets]
    return json.dumps({"records": records(groups), "tables": tables, "notes": list(notes)}, indent=1)


def terminal(sheet: Sheet, width: int) -> Lines:
    """Return a table for a terminal: in a narrow one without the columns that matter least, which it names."""
    grid = _fitting(sheet, width)
    kept = {str(c.header) for c in grid.columns}
    gone = [c.heading for c in sheet.columns if kept.isdisjoint((shown(c.heading), _head(c.heading, sheet)))]
    notes = list(sheet.notes) + ([f"no room here for: {', '.join(gone)}; --format md has them"] if gone else [])
    return Lines(grid, *(line(note, "dim", limit=2000) for note in notes), Text(""))


def _fitting(sheet: Sheet, width: int) -> Grid:
    """Return the widest table that fits: whole, or with short headings.

    Names are shortened a little before columns go, and more where none is left to.
    """
    names = [shown(row[i]) for row in sheet.rows for i, c in enumerate(sheet.columns) if not c.right]
    most, longest = max(c.rank for c in sheet.columns), max(map(cell_len, [*names, ""]))
    rooms = [longest, *(room for room in ROOMS if room < longest)]
    tries = [(keep, room) for keep in range(most, -1, -1) for room in rooms] + [(0, room) for room in range(SHORTEST, 3, -4)]
    short = (_grid(sheet, keep, shortened(names, room)) for keep, room in tries)
    grid = next((grid for grid in itertools.chain([_grid(sheet, most, {}, whole=True)], short) if needed(grid) <= width), None)
    return grid or _grid(sheet, 0, shortened(names, 4))


def _head(heading: str, sheet: Sheet) -> str:
    return shortened([shown(c.heading) for c in sheet.columns], NARROW)[shown(heading)]


def _grid(sheet: Sheet, keep: int, names: Mapping[str, str], whole: bool = False) -> Grid:
    grid = Grid(
        title=Text(shown(sheet.title), "italic"), title_justify="left", box=SIMPLE, pad_edge=False, padding=(0, 1, 0, 0)
    )
    places = [i for i, c in enumerate(sheet.columns) if c.rank <= keep]
    for i in places:
        column = sheet.columns[i]
        head = shown(column.heading) if whole else _head(column.heading, sheet)
        grid.add_column(head, justify="right" if column.right else "left", no_wrap=True)
    for index, row in enumerate(sheet.rows):
        texts = (names.get(shown(row[i]), shown(row[i])) for i in places)
        grid.add_row(*(Text(text, "bold" if (index, i) in sheet.best else "") for i, text in zip(places, texts, strict=True)))
    return grid
