"""A table of text and its formats: terminal, Markdown, LaTeX, and templates/parts.html of pages. No text in it is markup."""

import csv
import io
import itertools
import textwrap
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE
from rich.cells import cell_len
from rich.console import Group
from rich.table import Table as Grid
from rich.text import Text

from consilium.core.sanitize import cell, harmless, line, shown

NARROW = 14
"""Characters of a shortened heading at most."""
ROOMS = (48, 36, 28, 22, 16)
"""Widths to which names are shortened in a table that is too wide, in characters, tried in turn."""
TEX_COLUMN, TEX_PAGE = 229.0, 469.0
"""Points of a column and of a page of LaTeX's article in two columns; those of journals are not narrower."""
TEX_LETTER, TEX_GAP, TEX_TEXT = 4.5, 6.0, 60.0
"""Points of most letters in \\footnotesize and between two columns, and the least that a column of text is wrapped to."""
MOST_ROWS = 50
"""Rows of a table on a printed page."""


@dataclass(frozen=True)
class Column:
    """A heading. `rank`: a narrow terminal drops columns of the highest rank first, rank 0 never; `right`: numbers.

    `detail`: a paper has it in an appendix.
    """

    heading: str
    rank: int = 0
    right: bool = True
    detail: bool = False


@dataclass(frozen=True)
class Table:
    """A table of text, whose first column names a row. `best`: cells (row, column) to stand out; `sums`: rows of means.

    `caption`, `detail_caption`: whole sentences for a paper, of the table and of its columns of details, in place of title and
    notes. `whole`: no name in it is shortened.
    """

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    best: Set[tuple[int, int]] = frozenset()
    sums: Set[int] = frozenset()
    caption: str = ""
    detail_caption: str = ""
    whole: bool = False


def columns(*headings: str) -> list[Column]:
    """Return columns of numbers behind a column of names."""
    return [Column(heading, right=place > 0) for place, heading in enumerate(headings)]


def number(value: float | None) -> str:
    """Return a score as tables show it; "-" for none."""
    return "-" if value is None or value != value else f"{value:.3f}" if abs(value) < 1e6 else f"{value:.3g}"


def difference(value: float) -> str:
    """Return a difference of scores as tables show it; one that prints as zero has no sign."""
    found = f"{value:+.3f}"
    return found if float(found) else "0.000"


def few(names: Sequence[str], most: int = 4) -> str:
    """Return the first names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def terminal(table: Table, width: int, elsewhere: str = "--format md has them") -> Group:
    """Return a table for a terminal of `width` cells, with its notes.

    A table that is too wide gets headings in two lines, then short ones and, unless they stay whole, shortened names, then
    loses columns by rank, which it names with where they are (`elsewhere`). If nothing is left to drop, each cell gets a line.
    """
    texts, right = [[shown(text) for text in row] for row in table.rows], [one.right for one in table.columns]
    names = [text for row in texts for text, number in zip(row, right, strict=True) if not number]
    longest = max(map(cell_len, [*names, ""]))
    headings = [shown(one.heading) for one in table.columns]
    short = shortened(headings, NARROW)
    heads = [headings, list(map(_two_lines, headings)), [short[one] for one in headings]]
    rooms = [shortened(names, longest), *(shortened(names, room) for room in ROOMS if room < longest and not table.whole)]

    def room(place: int, head: Sequence[str], written: Mapping[str, str]) -> int:
        """Return the cells that a column takes, with a blank on each side."""
        parts = [*head[place].split("\n"), *(row[place] if right[place] else written[row[place]] for row in texts)]
        return 2 + max(map(cell_len, parts))

    looks = [*itertools.product(rooms, heads[:2]), *((written, heads[2]) for written in rooms)]
    most = max(one.rank for one in table.columns)
    for keep, (written, head) in itertools.product(range(most, -1, -1), looks):
        places = [i for i, one in enumerate(table.columns) if one.rank <= keep]
        if sum(room(place, head, written) for place in places) <= width:
            cells = [[row[i] if right[i] else written[row[i]] for i in places] for row in texts]
            grid = _grid(table, places, [head[i] for i in places], cells)
            break
    else:
        pairs = [(heading, text) for row in table.rows for heading, text in zip(headings, row, strict=True) if text]
        starts = {place for place, (heading, _) in enumerate(pairs) if heading == headings[0]}
        keep, grid = most, folding(Table("", columns("", ""), pairs, sums=starts))
    gone = [one for one, column in zip(headings, table.columns, strict=True) if column.rank > keep]
    notes = [*table.notes, *([f"no room here for: {', '.join(gone)}; {elsewhere}"] if gone else [])]
    title = [line(table.title, "italic", 1000)] if table.title else []
    return Group(*title, grid, *(line(note, "dim", limit=2000) for note in notes), Text(""))


def _two_lines(heading: str) -> str:
    """Return a heading broken at the blank nearest to its middle."""
    blanks = [i for i, letter in enumerate(heading) if letter == " "]
    middle = min(blanks, key=lambda i: abs(2 * i - len(heading)), default=None)
    return heading if middle is None else f"{heading[:middle]}\n{heading[middle + 1 :]}"


def _grid(table: Table, places: Sequence[int], heads: Sequence[str], cells: Sequence[Sequence[str]]) -> Grid:
    """Return some columns of a table, no cell broken; the best cells and the rows of means are bold."""
    grid = Grid(box=SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    for i, head in zip(places, heads, strict=True):
        grid.add_column(Text(head), justify="right" if table.columns[i].right else "left", no_wrap=True)
    for index, row in enumerate(cells):
        if (index in table.sums) != (index - 1 in table.sums):
            grid.add_section()
        bold = [index in table.sums or (index, i) in table.best for i in places]
        grid.add_row(*(Text(text, "bold" if strong else "") for text, strong in zip(row, bold, strict=True)))
    return grid


def folding(table: Table) -> Grid:
    """Return a table whose cells are all whole, in as many lines as they need; a row of `sums` begins a section."""
    headed = any(one.heading for one in table.columns)
    grid = Grid(box=SIMPLE, pad_edge=False, show_header=headed, title=line(table.title) if table.title else None)
    grid.title_justify = "left"
    for place, one in enumerate(table.columns):
        fixed = place == 0 and not headed
        grid.add_column(one.heading, justify="right" if one.right and headed else "left", overflow="fold", no_wrap=fixed)
    for place, row in enumerate(table.rows):
        if place in table.sums:
            grid.add_section()
        grid.add_row(*(line(text, limit=2000) for text in row))
    return grid


def shortened(names: Sequence[str], width: int) -> dict[str, str]:
    """Return how each name is written in at most `width` cells: whole, or its two ends; different names stay different.

    Where so many names are alike that `width` cannot tell them apart, some are longer than it.
    """
    found: dict[str, str] = {}
    used: set[str] = set()
    tried: Counter[str] = Counter()
    for name in sorted(set(names), key=lambda n: (cell_len(n) > width, n)):
        first = short = _ends(name, width, "…")
        while short in used:  # names that begin and end alike count on from one another
            tried[first] += 1
            short = _ends(name, width, f"…{tried[first] + 1}")
        found[name] = short
        used.add(short)
    return found


def _ends(name: str, width: int, mark: str) -> str:
    """Return the name itself, or as much of its beginning and end, equally, as fits with `mark` between them."""
    if cell_len(name) <= width and mark == "…":
        return name
    cuts = (name[: (kept + 1) // 2] + mark + name[len(name) - kept // 2 :] for kept in range(len(name), -1, -1))
    return next((cut for cut in cuts if cell_len(cut) <= width), mark)


def markdown(tables: Iterable[Table], notes: Sequence[str] = ()) -> str:
    """Return tables as a Markdown page; the best of a column is bold."""

    def line_of(cells: Iterable[str], bold: Set[int] = frozenset()) -> str:
        return "| " + " | ".join(f"**{cell(c)}**" if i in bold else cell(c) for i, c in enumerate(cells)) + " |"

    parts = [*(f"- {cell(note, 2000)}" for note in notes), ""]
    for table in tables:
        parts += [f"### {cell(table.title)}", "", line_of(column.heading for column in table.columns)]
        parts.append("|" + "|".join("--:" if column.right else "---" for column in table.columns) + "|")
        parts += [line_of(row, {c for r, c in table.best if r == index}) for index, row in enumerate(table.rows)]
        parts += ["", *(f"{cell(note, 2000)}.  " for note in table.notes), ""]
    return "\n".join(parts).strip() + "\n"


_TEX = {c: f"\\{c}" for c in "&%$#_{}"} | {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}",
    ">": r"\textgreater{}", "|": r"\textbar{}", '"': r"\textquotedbl{}", "–": "--", "±": r"$\pm$", "…": r"\ldots{}",
}  # fmt: skip
"""How LaTeX prints a character that it would read."""
_GREEK = {
    0x3B1: "alpha beta gamma delta varepsilon zeta eta theta iota kappa lambda mu nu xi o pi rho varsigma sigma tau upsilon "
    "varphi chi psi omega",
    0x391: "A B Gamma Delta E Z H Theta I K Lambda M N Xi O Pi P - Sigma T Upsilon Phi X Psi Omega",
}
_SIGNS = {"≥": "geq", "≤": "leq", "≠": "neq", "≈": "approx", "∼": "sim", "≪": "ll", "≫": "gg", "∞": "infty", "∈": "in",
          "→": "rightarrow", "←": "leftarrow", "↔": "leftrightarrow", "⇒": "Rightarrow", "↑": "uparrow", "↓": "downarrow",
          "ϵ": "epsilon", "ϕ": "phi", "ϑ": "vartheta", "×": "times", "√": "surd", "∆": "Delta", "∑": "sum"}  # fmt: skip
_SIGNS |= {chr(first + i): n for first, names in _GREEK.items() for i, n in enumerate(names.split())}
_TEX |= {c: rf"$\{name}$" if len(name) > 1 else name for c, name in _SIGNS.items()} | {"−": "$-$"}
_QUIET = frozenset("‘’“”„‚–—†‡•‰€™")
"""Beside Latin letters, which end at U+017F, what pdfLaTeX prints with T1 and textcomp."""


def tex(text: str) -> str:
    """Return a text that LaTeX prints as it is."""
    return "".join(_TEX.get(c, c) for c in shown(text, 2000))


_Piece = Mapping[int, float]
"""A part of a table that fits a column or a page: the points of each of its columns, by place."""


def latex(tables: Iterable[Table], notes: Sequence[str] = ()) -> str:
    """Return tables for a paper in two columns, in letters of 8 points, none wider than the page.

    A table that fits a column stays in it. Columns of details go to a table of their own, behind the others, and columns
    without a value are left out. Of a table that is too wide texts are wrapped, then its columns are shared out over several
    tables. The first lines say which packages they need, and which engine.
    """
    main, more = list[str](), list[str]()
    for table in tables:
        details = [i for i, column in enumerate(table.columns) if column.detail]
        empty = [i for i in range(1, len(table.columns)) if table.rows and all(row[i] in ("-", "") for row in table.rows)]
        rest = [i for i in range(1, len(table.columns)) if i not in (*details, *empty)]
        for page, places, about in ((main, rest, table.caption), (more, details, table.detail_caption)):
            for piece in _pieces(table, places) if places or page is main else ():
                for start in range(0, max(len(table.rows), 1), MOST_ROWS):
                    page += _environment(table, piece, range(start, min(start + MOST_ROWS, len(table.rows))), about)
    parts = [*main, *([r"% Appendix: the columns of details, such as a column for each site.", *more] if more else [])]
    left = "".join(sorted({c for c in "".join(parts) if ord(c) > 0x17F and c not in _QUIET}))
    needs = ["% needs: booktabs, array, textcomp, fontenc with T1; fits papers in two columns: 3.2 and 6.5 inches"]
    needs += [f"% needs: XeLaTeX or LuaLaTeX in place of pdfLaTeX, and a font that has {left[:40]}"] if left else []
    return "\n".join([*(f"% {shown(note, 2000)}" for note in notes), *needs, *parts])


def _pieces(table: Table, places: Sequence[int]) -> list[_Piece]:
    """Return the parts of a table with the first column and these, each as wide as a page at most."""

    def width(place: int) -> float:
        """Return the points that a column takes with no text wrapped: its widest cell or line of heading."""
        return TEX_GAP + max(map(_points, [*_cells(table, place), *_head_lines(table, place)]))

    whole = {place: width(place) for place in (0, *places)}
    texts = [place for place in whole if not table.columns[place].right]
    numbers = sum(whole[place] for place in whole if place not in texts)
    for most, least in ((TEX_COLUMN, 2 * TEX_TEXT), (TEX_PAGE, TEX_TEXT)):
        room = (most - numbers) / max(len(texts), 1)
        widths = whole | {place: min(whole[place], room) for place in texts}
        if sum(widths.values()) <= most and (widths == whole or room >= least):
            return [widths]
    found, first = list[_Piece](), {0: min(whole[0], 2 * TEX_TEXT)}
    part = dict(first)
    for place in places:
        own = min(whole[place], TEX_PAGE - first[0])
        if len(part) > 1 and sum(part.values()) + own > TEX_PAGE:
            found.append(part)
            part = dict(first)
        part[place] = own
    return [*found, part]


def _points(text: str) -> float:
    """Return how wide a text is at most in \\footnotesize, also in bold, in points."""
    return sum(8.8 if c in "MWmw@%" or c > "\u024f" else 6.8 if c.isupper() or c == "±" else TEX_LETTER for c in text)


def _cells(table: Table, place: int) -> list[str]:
    return [shown(row[place], 2000) for row in table.rows]


def _head_lines(table: Table, place: int) -> list[str]:
    """Return a heading in lines of about its column's width, of 30 letters at most."""
    heading, width = shown(table.columns[place].heading), max([10, *map(len, _cells(table, place))])
    lines = textwrap.wrap(heading, width, break_long_words=False)
    return [part for line in lines for part in textwrap.wrap(line, 30)] or [""]


def _environment(table: Table, piece: _Piece, rows: range, caption: str) -> list[str]:
    """Return a table environment with some columns and rows of a table."""
    wrapped = {
        place: room - TEX_GAP
        for place, room in piece.items()
        if not table.columns[place].right and max(map(_points, _cells(table, place)), default=0) > room - TEX_GAP
    }

    def line_of(cells: Iterable[str]) -> str:
        row = " & ".join(cells) + r" \\"
        return "{}" + row if row.startswith(("[", "*")) else row  # else an option of the line before

    def written(row: int, place: int) -> str:
        text = tex(table.rows[row][place])
        if place in wrapped:  # a word of over 12 letters may break at every eighth
            words = shown(table.rows[row][place], 2000).split(" ")
            text = " ".join(
                r"\allowbreak{}".join(map(tex, textwrap.wrap(word, 8) if len(word) > 12 else [word])) for word in words
            )
        return rf"\textbf{{{text}}}" if (row, place) in table.best else text

    def head(place: int) -> str:
        lines = _head_lines(table, place)
        stack = r"\\".join(map(tex, lines))
        return stack if len(lines) == 1 else rf"\shortstack[{'r' if table.columns[place].right else 'l'}]{{{stack}}}"

    def align(place: int) -> str:
        if place in wrapped:
            return rf">{{\raggedright\arraybackslash}}p{{{wrapped[place]:.0f}pt}}"
        return "r" if table.columns[place].right else "l"

    star = "*" if sum(piece.values()) > TEX_COLUMN else ""
    body = [line_of(written(row, place) for place in piece) for row in rows]
    under = [tex(" ".join(map(sentence, table.notes)))] if table.notes and not caption else []
    lines = [rf"\begin{{table{star}}}[t]", r"\centering\footnotesize\setlength{\tabcolsep}{3pt}"]
    lines += [rf"\caption{{{tex(sentence(caption or table.title))}}}\smallskip"]
    lines += [rf"\begin{{tabular}}{{{''.join(map(align, piece))}}}", r"\toprule", line_of(map(head, piece))]
    lines += [r"\midrule", *body, r"\bottomrule", r"\end{tabular}"]
    return [*lines, *(rf"\par\smallskip\raggedright {one}" for one in under), rf"\end{{table{star}}}", ""]


def sentence(text: str) -> str:
    """Return a text that begins with a capital letter, unless it is a symbol, and ends with a full stop."""
    return f"{text[:1].upper() if text[:1].isascii() else text[:1]}{text[1:]}".rstrip(".") + "."


def csv_text(rows: Sequence[Mapping[str, Any]], heads: Sequence[str] = ()) -> str:
    """Return rows as CSV. A text that a spreadsheet would take for a formula begins with an apostrophe."""
    file = io.StringIO()
    writer = csv.DictWriter(file, heads or list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: harmless(one.get(key)) for key in writer.fieldnames} for one in rows)
    return file.getvalue()


def size(count: float) -> str:
    """Return a number of bytes in words."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= factor:
            return f"{count / factor:,.2f} {unit}"
    return f"{count:,.0f} B"


def stamp(seconds: float) -> str:
    """Return a time in words, in UTC."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
    except (ValueError, OverflowError, OSError):
        return "an impossible time"


def duration(seconds: float) -> str:
    """Return seconds in words."""
    return f"{seconds:.1f} s" if seconds < 90 else f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
