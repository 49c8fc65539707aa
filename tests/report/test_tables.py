"""Tables in every format and at every width: names are text, and nothing is cut off unseen."""

import csv
import io
import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from consilium.core.messages import Stage
from consilium.report.compare.comparability import group_comparable
from consilium.report.compare.tables import ROW, as_json, comparison_tables, records
from consilium.report.run_record import read_finished_run
from consilium.report.tables import (
    Column,
    Table,
    csv_text,
    difference_text,
    latex_text,
    markdown_text,
    significant_text,
    terminal_table,
)
from tests.conftest import small_config
from tests.report.pages import make_run
from tests.report.runs import make


def test_what_prints_no_digit_has_no_sign() -> None:
    values = [-0.0004, 0.0004, 0.0, -0.0006, 0.25]
    assert [difference_text(value) for value in values] == ["0.000", "0.000", "0.000", "-0.001", "+0.250"]
    assert [significant_text(value) for value in (999.4, 999.6, -999.6, 1e6)] == ["999", "1,000", "-1,000", "1e+06"]


EVIL = "=SUM(A1)|50%_of $x & {y}#~^\\ " + "n" * 40


def test_names_are_text_in_every_format(tmp_path: Path) -> None:
    runs = [read_finished_run(make(tmp_path / m, {EVIL: 0.5}, m), m, {"method": f"{EVIL}{m}"}) for m in ("fedit", "ffa_lora")]
    groups, _ = group_comparable(runs)
    found = comparison_tables(groups, Stage.GLOBAL)
    tex = latex_text(found).replace(r"\allowbreak{}", "")
    assert r"=SUM(A1)\textbar{}50\%\_of \$x \& \{y\}\#\textasciitilde{}\textasciicircum{}\textbackslash{} nnn" in tex
    for tabular in re.findall(r"\\begin{tabular}{([^\n]*)}\n(.*?)\\end{tabular}", tex, re.DOTALL):
        count = len(re.findall(r"[lr]|p(?={)", re.sub(r">{[^}]*}", "", tabular[0])))
        rows = [line for line in tabular[1].splitlines() if line.endswith(r" \\")]
        assert {line.replace(r"\&", "").count("&") for line in rows} == {count - 1}
    page = markdown_text(found)
    assert r"=SUM(A1)\|50%\_of \$x" in page
    assert "ffa_lora" in page  # amid a word it is no emphasis
    rows = list(csv.DictReader(io.StringIO(csv_text(records(groups), ROW))))
    assert {row["site"][:6] for row in rows} == {"'=SUM("}
    assert {row["value"] for row in rows} == {"0.5", "0.2"}
    assert json.loads(as_json(groups, found, []))["records"][0]["site"] == EVIL


def test_latex_reads_no_name_as_an_option_and_letters_it_lacks_become_signs() -> None:
    rows = [["[a] 50%", "0.5"], ["*star", "0.6"], ["ε≥3 – Ünïcode µ", "Ω→σ ς ο Α"], ['"q" −5', "--x [b]"]]
    page = latex_text([Table("β", [Column("[method]"), Column("*")], rows, best=frozenset({(1, 0)}))], ["Привет"])
    assert page.splitlines() == [
        "% needs: booktabs, array, textcomp, fontenc with T1; no table is wider than a column of 3.2 or a page of 6.5 inches",
        "% Привет",
        r"\begin{table}[t]",
        r"\centering\footnotesize\setlength{\tabcolsep}{3pt}",
        r"\caption{$\beta$.}\smallskip\label{tab:untitled}",
        r"\begin{tabular}{rr}",
        r"\toprule",
        r"{}[method] & * \\",
        r"\midrule",
        r"{}[a] 50\% & 0.5 \\",
        r"\textbf{*star} & 0.6 \\",
        r"$\varepsilon$$\geq$3 -- Ünïcode µ & $\Omega$$\rightarrow$$\sigma$ $\varsigma$ o A \\",
        r"\textquotedbl{}q\textquotedbl{} $-$5 & -{}-x [b] \\",
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    cyrillic = latex_text([Table("ба", [Column("m")], [["你"]])])
    assert "% needs: XeLaTeX or LuaLaTeX in place of pdfLaTeX, and a font that has аб你" in cyrillic


def printed(folder: Path, tex: str) -> str:
    """Return the log of pdfLaTeX for a paper in two columns, on A4, of these tables; skip where there is no LaTeX."""
    if (program := shutil.which("pdflatex")) is None:
        pytest.skip("no pdflatex here")
    packages = r"\usepackage{booktabs,array,textcomp}\usepackage[T1]{fontenc}\usepackage[utf8]{inputenc}"
    body = tex.replace("[t]", "[p]")
    (folder / "paper.tex").write_text(
        rf"\documentclass[10pt,twocolumn]{{article}}{packages}\begin{{document}}{chr(10)}{body}\clearpage\end{{document}}"
    )
    done = subprocess.run([program, "-interaction=nonstopmode", "paper.tex"], cwd=folder, capture_output=True, check=False)
    assert (done.returncode, (folder / "paper.pdf").is_file()) == (0, True), done.stdout.decode(errors="replace")[-2000:]
    return done.stdout.decode(errors="replace")


@pytest.mark.slow
@pytest.mark.parametrize(("sites", "method"), [(3, "m"), (9, "a rather long name of a method"), (24, "W" * 40), (2, EVIL)])
def test_latex_prints_tables_that_no_paper_cuts_off(sites: int, method: str, tmp_path: Path) -> None:
    runs = []
    for seed, name in itertools.product(range(3), ("fedit", "ffa_lora", "fedprox")):
        scores = {f"{'Klinikum der Stadt ' * (site % 2)}{site}": 0.5 + 0.01 * site + 0.001 * seed for site in range(sites)}
        folder = make(tmp_path / f"{name}-{seed}", scores, name, seed)
        runs.append(read_finished_run(folder, folder.name, {"method": f"{method} {name}"}))
    found = comparison_tables(group_comparable(runs)[0], Stage.GLOBAL)
    tex = latex_text(found)
    assert "resizebox" not in tex
    log = printed(tmp_path, tex)
    assert not [line for line in log.splitlines() if line.startswith("Overfull")]
    assert tex.count(r"\toprule") == tex.count(r"\midrule") == tex.count(r"\bottomrule") == tex.count(r"\begin{tabular}")


def test_a_papers_main_table_has_means_and_an_appendix_has_the_sites(tmp_path: Path) -> None:
    runs = []
    for name, seed in itertools.product(("fedit", "ffa_lora"), range(3)):
        folder = make(
            tmp_path / f"{name}-{seed}", {"north": 0.5 + 0.1 * seed, "south": 0.6 - 0.1 * (name == "fedit")}, name, seed
        )
        runs.append(read_finished_run(folder, folder.name, {"method": name}))
    main, appendix = latex_text(comparison_tables(group_comparable(runs)[0], Stage.GLOBAL)).split("% Appendix")
    assert not re.search("^method .*north", main, re.MULTILINE)
    assert re.search(r"^method & (north & south|.*north.*south) \\\\$", appendix, re.MULTILINE)
    # by hand: sites' means over seeds .6 and .6 for ffa_lora, over both .55, .6, .65: .6 with deviation .05
    assert r"ffa\_lora & 3/3 & \textbf{0.600 $\pm$ 0.050}" in main
    captions = [one for one in re.findall(r"\\caption{(.*)}\\smallskip", main + appendix) if "Accuracy, global" in one]
    assert len(captions) == 2
    for caption, words in zip(captions, (("2 sites", "3 seeds", "percentile bootstraps"), ("by site", "3 seeds")), strict=True):
        assert all(one in caption for one in words)
        assert caption.endswith(".")
        assert all(part[0].isupper() for part in caption.replace("95 \\%", "95").split(". "))
    assert not any("rank" in caption.lower() for caption in captions if "by site" in caption)  # it has no such column


@pytest.mark.parametrize(("grid", "named"), [("original", "original grid"), ("resized", "model grid")])
def test_a_papers_caption_names_the_grid_of_masks(grid: str, named: str, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", task=small_config("fedit").model_dump(mode="json")["task"] | {"scores": {"grid": grid}})
    tex = latex_text(comparison_tables(group_comparable([read_finished_run(folder, "run")])[0], Stage.GLOBAL))
    captions = [one for one in re.findall(r"\\caption{(.*)}\\smallskip", tex) if "Dice" in one]
    assert captions
    assert all(named in one for one in captions)


def test_a_terminal_of_80_cells_holds_40_methods_of_60_letters(tmp_path: Path) -> None:
    scores = {f"site-{i}": 0.5 for i in range(6)}
    runs = []
    for i in range(40):
        folder = make(tmp_path / str(i), scores, {"name": "fedprox", "mu": 0.01 * (i + 1)})
        runs.append(
            read_finished_run(folder, str(i), {"method": f"{'a rather long name of a method, ' * 2}{i}".rjust(60)[:66]})
        )
    groups, _ = group_comparable(runs)
    assert len(groups[0].methods) == 40
    console = Console(file=io.StringIO(), width=80)
    for sheet in comparison_tables(groups, Stage.GLOBAL):
        console.print(terminal_table(sheet, 80))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if line.rstrip().endswith("…")], "nothing is cut off unseen"
    assert any("750 more with larger p" in " ".join(lines[i : i + 2]) for i in range(len(lines)))


@pytest.mark.parametrize(("width", "heading"), [(40, "Klinikum rechts der Elbe"), (25, "Klinikum")])
def test_headings_are_whole_then_in_several_lines(width: int, heading: str) -> None:
    table = Table("t", [Column("method", right=False), Column("Klinikum rechts der Elbe")], [["FedIT", "0.5"]])
    console = Console(width=width, file=io.StringIO())
    console.print(terminal_table(table, width))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines[2].split("  ")[-1].strip() == heading
    assert ("rechts" in lines[3]) is (width == 25)
    assert not any("no room" in line for line in lines)


def test_a_table_without_room_has_a_line_per_cell_and_loses_no_number() -> None:
    heads = [Column("site", right=False), *(Column(f"score {i}") for i in range(6)), Column("optional", 1)]
    table = Table("t", heads, [["a hospital", *(f"0.{i}11" for i in range(6)), "9"]])
    for width, dropped in ((60, True), (24, False)):
        console = Console(width=width, file=io.StringIO())
        console.print(terminal_table(table, width, "see results.json"))
        text = console.file.getvalue()  # type: ignore[attr-defined]
        assert max(map(len, text.splitlines())) <= width
        assert all(f"0.{i}11" in text for i in range(6))
        assert ("no room here for: optional; see results.json" in text) is dropped
