"""A table of texts, and its output for terminals, Markdown, LaTeX and CSV. Pages print it by templates/parts.html.

Every format escapes the texts, so no text acts as markup.
"""

import csv
import io
import itertools
import re
import textwrap
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, TypeVar

from rich.box import SIMPLE
from rich.cells import cell_len
from rich.console import Group
from rich.table import Table as Grid
from rich.text import Text

from consilium.core.sanitize import csv_cell, markdown_cell, rich_line, shown

T = TypeVar("T")

WRAPPED = 16
"""Cells of a terminal to which a column of texts is narrowed, at most. Its texts wrap."""
TEX_COLUMN, TEX_PAGE = 229.0, 469.0
"""Widths in points of a column and of a page of LaTeX's two-column article. Journals' columns are not narrower."""
TEX_LETTER, TEX_GAP, TEX_TEXT = 4.8, 6.0, 60.0
"""Points: the width of most letters in \\footnotesize, the gap between columns, the least width of a wrapped column."""
MOST_ROWS = 50
"""Rows of a table on a printed page, at most."""


@dataclass(frozen=True)
class Column:
    """A column of a table: its heading and its layout.

    `rank`: a terminal that is too narrow drops the columns of the highest rank first and never those of rank 0. `right`: align
    right, as for numbers. `detail`: LaTeX puts the column into a separate table for an appendix.
    """

    heading: str
    rank: int = 0
    right: bool = True
    detail: bool = False


@dataclass(frozen=True)
class Table:
    """A table of texts. The first column names the rows.

    Title and notes are the sentences of LaTeX's caption. `best`: cells (row, column) in bold. `sums`: rows of means or sums.
    `appendix`: LaTeX puts the table into the appendix. `detail_notes`: take the place of `notes` at LaTeX's table of details.
    `advice`: lines to the author, such as a setting to change. LaTeX has them as comments, outside the caption.
    """

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    best: Set[tuple[int, int]] = frozenset()
    sums: Set[int] = frozenset()
    appendix: bool = False
    detail_notes: Sequence[str] = ()
    advice: Sequence[str] = ()


def columns(*headings: str) -> list[Column]:
    """Return a column of names, by the first heading, and columns of numbers by the others."""
    return [Column(heading, right=place > 0) for place, heading in enumerate(headings)]


def number_text(value: float | None) -> str:
    """Return a score as tables show it: three digits after the point, or "-" for None and NaN."""
    return "-" if value is None or value != value else f"{value:.3f}" if abs(value) < 1e6 else f"{value:.3g}"


def significant_text(value: float | None) -> str:
    """Return a number with three significant digits, or all digits before the point; "-" for None and NaN."""
    if value is None or value != value:
        return "-"
    return f"{value:,.0f}" if 999.5 <= abs(value) < 1e6 else f"{value:.3g}"


def difference_text(value: float) -> str:
    """Return a difference of scores as tables show it, with its sign, but "0.000" if it rounds to zero."""
    found = f"{value:+.3f}"
    return found if float(found) else "0.000"


def only_true(texts: Mapping[T, object]) -> list[T]:
    """Return the texts, or rows of texts, whose value is true, in order, such as the notes that apply to a table."""
    return [text for text, holds in texts.items() if holds]


def terminal_table(table: Table, width: int, elsewhere: str = "--format md has them") -> Group:
    """Return a table for a terminal of `width` cells, with its notes.

    If the table is too wide, headings of numbers get several lines, and texts wrap at blanks, to WRAPPED cells or more. A word,
    such as a name or a job's id, is not broken. If that is not enough, columns are dropped by rank, and a note names them and
    says where to find them (`elsewhere`). If no column can be dropped any more, each cell gets a line of its own.
    """
    most = max(one.rank for one in table.columns)
    for keep, wraps in itertools.product(range(most, -1, -1), (False, True)):
        grid, least = _grid(table, [place for place, one in enumerate(table.columns) if one.rank <= keep], wraps)
        if least <= width:
            break
    else:
        headings = [one.heading for one in table.columns]
        pairs = [pair for row in table.rows for pair in (*zip(headings, row, strict=True), ("", ""))]
        names = {(place, 1) for place, (heading, _) in enumerate(pairs) if heading == headings[0]}
        keep, (grid, _) = most, _grid(Table("", [Column("", right=False)] * 2, pairs, best=names), (0, 1), True)
        grid.columns[1].min_width = None  # a word that is longer than a line is folded
    gone = [shown(one.heading) for one in table.columns if one.rank > keep]
    notes = [
        *table.notes,
        *table.advice,
        *([f"no room here for: {', '.join(dict.fromkeys(gone))}; {elsewhere}"] if gone else []),
    ]
    title = [rich_line(table.title, "italic", 1000)] if table.title else []
    return Group(*title, grid, *(rich_line(note, "dim", limit=2000) for note in notes), Text(""))


def _grid(table: Table, places: Sequence[int], wraps: bool) -> tuple[Grid, int]:
    """Return the columns at `places` for a terminal, and the cells that they need at least. Best cells and sums are bold."""
    headed = any(table.columns[place].heading for place in places)
    grid, least = Grid(box=SIMPLE, pad_edge=False, padding=(0, 1, 0, 0), show_header=headed), 0
    for place in places:
        right, head = table.columns[place].right, shown(table.columns[place].heading)
        texts = [shown(row[place], 2000) for row in table.rows]
        cells, word = (
            max(map(cell_len, parts), default=0) for parts in (texts, [one for text in texts for one in text.split()])
        )
        if right and wraps:
            head = "\n".join(textwrap.wrap(head, max(cells, 6), break_long_words=False))
        widest = max(cells, *map(cell_len, head.split("\n")))
        need = widest if right or not wraps else max(word, min(widest, WRAPPED))
        grid.add_column(
            Text(head), "", justify="right" if right else "left", overflow="fold", no_wrap=right or not wraps, min_width=need
        )
        least += 2 + need
    for index, row in enumerate(table.rows):
        if (index in table.sums) != (index - 1 in table.sums):
            grid.add_section()
        bold = [index in table.sums or (index, place) in table.best for place in places]
        grid.add_row(*(rich_line(row[i], "bold" if strong else "", 2000) for i, strong in zip(places, bold, strict=True)))
    return grid, least


def shorten_names(names: Sequence[str], width: int) -> dict[str, str]:
    """Return for each name a text of at most `width` terminal cells: the name, or its beginning and end.

    Different names get different texts: those that would be shortened to the same text stay whole.
    """
    found: dict[str, str] = {}
    for name in names:
        cuts = (name[: (kept + 1) // 2] + "…" + name[len(name) - kept // 2 :] for kept in range(len(name) - 1, -1, -1))
        found[name] = name if cell_len(name) <= width else next((cut for cut in cuts if cell_len(cut) <= width), "…")
    counts = Counter(found.values())
    return {name: short if counts[short] == 1 else name for name, short in found.items()}


def markdown_text(tables: Iterable[Table], notes: Sequence[str] = ()) -> str:
    """Return notes and tables as Markdown. The best cells are bold."""

    def line_of(cells: Iterable[str], bold: Set[int] = frozenset()) -> str:
        return (
            "| " + " | ".join(f"**{markdown_cell(c)}**" if i in bold else markdown_cell(c) for i, c in enumerate(cells)) + " |"
        )

    parts = [*(f"- {markdown_cell(note, 2000)}" for note in notes), ""]
    for table in tables:
        parts += [
            f"### {markdown_cell(table.title)}",
            "",
            line_of(column.heading for column in table.columns),
            "|" + "|".join("--:" if column.right else "---" for column in table.columns) + "|",
            *(line_of(row, {c for r, c in table.best if r == index}) for index, row in enumerate(table.rows)),
            "",
            *(f"{markdown_cell(note, 2000)}.  " for note in (*table.notes, *table.advice)),
            "",
        ]
    return "\n".join(parts).strip() + "\n"


_TEX = {c: f"\\{c}" for c in "&%$#_{}"} | {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}",
    ">": r"\textgreater{}", "|": r"\textbar{}", '"': r"\textquotedbl{}", "–": "--", "±": r"$\pm$", "…": r"\ldots{}",
}  # fmt: skip
"""LaTeX for each character that LaTeX would interpret or cannot print."""
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
"""Characters beyond U+017F, where Latin letters end, that pdfLaTeX prints with T1 and textcomp."""


def escape_tex(text: str) -> str:
    """Return a text escaped for LaTeX. The hyphen before a number that begins a word is a minus. Two hyphens stay two."""
    signed = re.sub(r"(?<!\S)-(?=[0-9])", "−", shown(text, 2000))
    return "-{}-".join("".join(_TEX.get(c, c) for c in part) for part in signed.split("--"))


def _word_parts(word: str) -> list[str]:
    """Return the parts between which a long word may break: after ".", "_" and "/", in longer parts also elsewhere."""
    parts = re.findall(r"[^._/]*[._/]|[^._/]+", word) if len(word) > 12 else [word]
    return [piece for part in parts for piece in (textwrap.wrap(part, 8) if len(part) > 12 else [part])]


def tex_label(kind: str, text: str, used: Counter[str]) -> str:
    """Return a \\label of small ASCII letters, digits and hyphens. `used`: the file's labels; repeated ones are numbered."""
    name = "-".join(re.findall("[a-z0-9]+", text.lower())) or "untitled"
    used[name] += 1
    return rf"\label{{{kind}:{name}{f'-{used[name]}' if used[name] > 1 else ''}}}"


_Piece = Mapping[int, float]
"""Columns of a table that together fit a column or a page of a paper: each column's width in points, by its index."""


def latex_text(tables: Iterable[Table], notes: Sequence[str] = ()) -> str:
    """Return tables as LaTeX for a two-column paper, in letters of 8 points, none wider than the page.

    A table that fits into one column of the paper stays there. Columns of details go into tables of their own at the end, and
    columns without values are left out. If a table is too wide, its texts are wrapped; if that is not enough, it is split into
    several tables. The first lines name the packages and the LaTeX engine that are needed.
    """
    main, more, labels, advice = list[str](), list[str](), Counter[str](), list[str]()
    for table in tables:
        advice += [f"{table.title}: {line}" for line in table.advice]
        details = [i for i, column in enumerate(table.columns) if column.detail]
        empty = [i for i in range(1, len(table.columns)) if table.rows and all(row[i] in ("-", "") for row in table.rows)]
        rest = [i for i in range(1, len(table.columns)) if i not in (*details, *empty)]
        # a note that begins with the heading of a column that is left out goes with it
        gone = tuple(table.columns[i].heading for i in empty if table.columns[i].heading)
        for page, places, title, notes_of in (
            (more if table.appendix else main, rest, table.title, [one for one in table.notes if not one.startswith(gone)]),
            (more, details, f"{table.title}, by site", table.detail_notes),
        ):
            about = " ".join(map(sentence, [title, *notes_of]))
            for piece in _pieces(table, places) if places or places is rest else ():
                for start in range(0, max(len(table.rows), 1), MOST_ROWS):
                    label = tex_label("tab", title, labels)
                    page += _environment(table, piece, range(start, min(start + MOST_ROWS, len(table.rows))), about, label)
    parts = [
        *main,
        *(
            [r"% Appendix: settings, data, diagnostics, and the columns of details, such as a column for each site.", *more]
            if more
            else []
        ),
    ]
    left = "".join(sorted({c for c in "".join(parts) if ord(c) > 0x17F and c not in _QUIET}))
    needs = [
        "% needs: booktabs, array, textcomp, fontenc with T1; no table is wider than a column of 3.2 or a page of 6.5 inches",
        *([f"% needs: XeLaTeX or LuaLaTeX in place of pdfLaTeX, and a font that has {left[:40]}"] if left else []),
    ]
    return "\n".join([*needs, *(f"% {shown(note, 2000)}" for note in (*notes, *advice)), *parts])


def _pieces(table: Table, places: Sequence[int]) -> list[_Piece]:
    """Split a table's columns at `places` into pieces that fit a page. Each piece has the first column too."""

    def width(place: int) -> float:
        """Return a column's width in points without wrapped texts: its widest cell or line of heading, and the gap."""
        return TEX_GAP + max(map(_width_in_points, [*_column_cells(table, place), *_head_lines(table, place)]))

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


def _width_in_points(text: str) -> float:
    """Return about a text's width in points, in \\footnotesize: at least that in Times.

    Bold words in Computer Modern are up to 9 % wider, if they are capitals.
    """
    wide = {c: 8.8 for c in "MWmw@%&"} | {c: 3.6 for c in "filjt.,:;'()/| -"}
    return sum(wide.get(c, 8.8 if c > "\u024f" else 6.8 if c.isupper() or c in "±+" else TEX_LETTER) for c in text)


def _column_cells(table: Table, place: int) -> list[str]:
    return [shown(row[place], 2000) for row in table.rows]


def _head_lines(table: Table, place: int) -> list[str]:
    """Return a heading as lines of about its column's width, at most 30 letters each."""
    heading, width = shown(table.columns[place].heading), max([10, *map(len, _column_cells(table, place))])
    return [part for line in textwrap.wrap(heading, width, break_long_words=False) for part in textwrap.wrap(line, 30)] or [""]


def _environment(table: Table, piece: _Piece, rows: range, caption: str, label: str) -> list[str]:
    """Return the lines of a LaTeX table environment with one piece's columns and the given rows. `label`: its \\label."""
    wrapped = {
        place: room - TEX_GAP
        for place, room in piece.items()
        if not table.columns[place].right
        and max(map(_width_in_points, _column_cells(table, place)), default=0) > room - TEX_GAP
    }

    def line_of(cells: Iterable[str]) -> str:
        row = " & ".join(cells) + r" \\"
        return "{}" + row if row.startswith(("[", "*")) else row  # LaTeX would read [ or * as an option of the line before

    def written(row: int, place: int) -> str:
        text = escape_tex(table.rows[row][place])
        if place in wrapped:
            words = shown(table.rows[row][place], 2000).split(" ")
            text = " ".join(r"\allowbreak{}".join(map(escape_tex, _word_parts(word))) for word in words)
        return rf"\textbf{{{text}}}" if (row, place) in table.best else text

    def head(place: int) -> str:
        lines = _head_lines(table, place)
        stack = r"\\".join(map(escape_tex, lines))
        return stack if len(lines) == 1 else rf"\shortstack[{'r' if table.columns[place].right else 'l'}]{{{stack}}}"

    def align(place: int) -> str:
        plain = "r" if table.columns[place].right else "l"
        return rf">{{\raggedright\arraybackslash}}p{{{wrapped[place]:.0f}pt}}" if place in wrapped else plain

    star = "*" if sum(piece.values()) > TEX_COLUMN else ""
    body = [line_of(written(row, place) for place in piece) for row in rows]
    return [
        rf"\begin{{table{star}}}[t]",
        r"\centering\footnotesize\setlength{\tabcolsep}{3pt}",
        rf"\caption{{{escape_tex(caption)}}}\smallskip{label}",
        rf"\begin{{tabular}}{{{''.join(map(align, piece))}}}",
        r"\toprule",
        line_of(map(head, piece)),
        r"\midrule",
        *body,
        r"\bottomrule",
        r"\end{tabular}",
        rf"\end{{table{star}}}",
        "",
    ]


def sentence(text: str) -> str:
    """Return a text with a capital first letter, if it is an ASCII letter, and a full stop at the end."""
    return f"{text[:1].upper() if text[:1].isascii() else text[:1]}{text[1:]}".rstrip(".") + "."


def csv_text(rows: Sequence[Mapping[str, Any]], heads: Sequence[str] = ()) -> str:
    """Return rows as CSV. A text that a spreadsheet would take for a formula begins with an apostrophe."""
    file = io.StringIO()
    writer = csv.DictWriter(file, heads or list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: csv_cell(one.get(key)) for key in writer.fieldnames} for one in rows)
    return file.getvalue()


def size_text(count: float) -> str:
    """Return a number of bytes as a text with its unit."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= factor:
            return f"{count / factor:,.2f} {unit}"
    return f"{count:,.0f} B"


def timestamp_text(seconds: float) -> str:
    """Return a time, in seconds since 1970, as a date and time in UTC."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
    except (ValueError, OverflowError, OSError):
        return "an impossible time"


def duration_text(seconds: float) -> str:
    """Return a duration as a text in seconds, minutes or hours."""
    return f"{seconds:.1f} s" if seconds < 90 else f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
