"""Tables in every format and at every width: names are text, and nothing is cut off unseen."""

import csv
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from consilium.core.messages import Stage
from consilium.report.compare.comparability import grouped
from consilium.report.compare.tables import as_csv, as_json, comparison_tables
from consilium.report.run_record import read_finished
from consilium.report.tables import Column, Table, difference, latex, markdown, terminal
from tests.report.runs import make


def test_what_prints_no_digit_has_no_sign() -> None:
    values = [-0.0004, 0.0004, 0.0, -0.0006, 0.25]
    assert [difference(value) for value in values] == ["0.000", "0.000", "0.000", "-0.001", "+0.250"]


EVIL = "=SUM(A1)|50%_of $x & {y}#~^\\ " + "n" * 40


def test_names_are_text_in_every_format(tmp_path: Path) -> None:
    runs = [read_finished(make(tmp_path / m, {EVIL: 0.5}, m), m, {"method": f"{EVIL}{m}"}) for m in ("fedit", "ffa_lora")]
    groups, _ = grouped(runs)
    found = comparison_tables(groups, Stage.GLOBAL)
    tex = latex(found)
    assert r"=SUM(A1)\textbar{}50\%\_of \$x \& \{y\}\#\textasciitilde{}\textasciicircum{}\textbackslash{} nnn" in tex
    for line in (line for line in tex.splitlines() if line.endswith(r" \\") and "fedit" in line):
        assert line.replace(r"\&", "").count("&") in {8 - 1, 7, 8, 6}
    page = markdown(found)
    assert r"=SUM(A1)\|50%\_of \$x" in page
    assert "ffa_lora" in page  # amid a word it is no emphasis
    rows = list(csv.DictReader(io.StringIO(as_csv(groups))))
    assert {row["site"][:6] for row in rows} == {"'=SUM("}
    assert {row["value"] for row in rows} == {"0.5", "0.2"}
    assert json.loads(as_json(groups, found, []))["records"][0]["site"] == EVIL


def test_latex_reads_no_name_as_an_option_and_letters_it_lacks_become_signs() -> None:
    rows = [["[a] 50%", "0.5"], ["*star", "0.6"], ["ε≥3 – Ünïcode µ", "Ω→σ ς ο Α"], ['"q" −5', "x [b]"]]
    page = latex([Table("β", [Column("[method]"), Column("*")], rows, best=frozenset({(1, 0)}))], ["Привет"])
    assert page.splitlines() == [
        "% Привет",
        "% needs: booktabs, graphicx, textcomp, fontenc with T1",
        r"\begin{table}[t]",
        r"\centering",
        r"\caption{$\beta$.}",
        r"\begin{tabular}{rr}",
        r"\toprule",
        r"{}[method] & * \\",
        r"\midrule",
        r"{}[a] 50\% & 0.5 \\",
        r"\textbf{*star} & 0.6 \\",
        r"$\varepsilon$$\geq$3 -- Ünïcode µ & $\Omega$$\rightarrow$$\sigma$ $\varsigma$ o A \\",
        r"\textquotedbl{}q\textquotedbl{} $-$5 & x [b] \\",
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    cyrillic = latex([Table("ба", [Column("m")], [["你"]])])
    assert "% needs: XeLaTeX or LuaLaTeX in place of pdfLaTeX, and a font that has аб你" in cyrillic


def test_a_terminal_of_80_cells_holds_40_methods_of_60_letters(tmp_path: Path) -> None:
    scores = {f"site-{i}": 0.5 for i in range(6)}
    runs = []
    for i in range(40):
        folder = make(tmp_path / str(i), scores, {"name": "fedprox", "mu": 0.01 * (i + 1)})
        runs.append(read_finished(folder, str(i), {"method": f"{'a rather long name of a method, ' * 2}{i}".rjust(60)[:66]}))
    groups, _ = grouped(runs)
    assert len(groups[0].methods) == 40
    console = Console(file=io.StringIO(), width=80)
    for sheet in comparison_tables(groups, Stage.GLOBAL):
        console.print(terminal(sheet, 80))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if line.rstrip().endswith("…")], "nothing is cut off unseen"
    assert any("750 more with larger p" in " ".join(lines[i : i + 2]) for i in range(len(lines)))


@pytest.mark.parametrize(
    ("width", "heading"), [(40, "Klinikum rechts der Elbe"), (25, "Klinikum rechts"), (24, "Kliniku…r Elbe")]
)
def test_headings_are_whole_then_in_two_lines_then_short(width: int, heading: str) -> None:
    table = Table("t", [Column("method", right=False), Column("Klinikum rechts der Elbe")], [["FedIT", "0.5"]])
    console = Console(width=width, file=io.StringIO())
    console.print(terminal(table, width))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines[2].split("  ")[-1].strip() == heading
    assert ("der Elbe" in lines[3]) is (width == 25)
    assert not any("no room" in line for line in lines)


def test_a_table_that_no_name_can_be_shortened_for_has_a_line_per_cell_and_loses_no_number() -> None:
    heads = [Column("site", right=False), *(Column(f"score {i}") for i in range(6)), Column("optional", 1)]
    table = Table("t", heads, [["a hospital", *(f"0.{i}11" for i in range(6)), "9"]])
    for width, dropped in ((60, True), (24, False)):
        console = Console(width=width, file=io.StringIO())
        console.print(terminal(table, width, "see results.json"))
        text = console.file.getvalue()  # type: ignore[attr-defined]
        assert max(map(len, text.splitlines())) <= width
        assert all(f"0.{i}11" in text for i in range(6))
        assert ("no room here for: optional; see results.json" in text) is dropped
