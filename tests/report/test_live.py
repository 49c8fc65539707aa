"""The live view at the sizes people have, with the names people give, while something loads, and in a pipe."""

import io

import pytest
from rich.cells import cell_len
from rich.console import Console

from consilium.core.messages import loading_event
from consilium.report.live_view import LiveView
from tests.report.shown_scores import DICE

WIDTHS = (60, 80, 140)
LONG = [("histology-university-hospital-of-the-northern-city-department-" + end)[-64:] for end in "abc"]
ODD = ["大学病院放射線科" * 8, "Klinikum-für-Augenheilkunde-Süd", "a\u202eb\x1b[31m", "[red]x[/]", "e\u0301" * 32]
MANY = [f"hospital-of-a-long-name-that-all-have-in-common-{i:02d}" for i in range(50)]


def begun(width: int, names: list[str], terminal: bool = True, height: int = 24) -> tuple[LiveView, Console]:
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=terminal, color_system=None)
    return LiveView(console, 9, "job", DICE), console


def lines(view: LiveView, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(view.render())
    return console.file.getvalue().splitlines()


def train(view: LiveView, names: list[str]) -> None:
    """Let all take part, the first three have trained, the last one be at work."""
    for name in names:
        view({"event": "site", "site": name, "num_samples": 3})
    view({"event": "round", "round": 3, "phase": 0, "phases": 1, "sites": names})
    scores = {"validation/global/dice": 0.125, "validation/personalized/dice": 0.625, "train/loss": 1.0}
    for name in names[:3]:
        view({"event": "metrics", "site": name, "round": 3, "metrics": scores})
    view({"event": "step", "site": names[-1], "step": 3, "steps": 1200, "loss": 1.25})


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("names", [LONG, ODD, MANY], ids=["long", "odd", "many"])
def test_no_line_is_wider_and_every_name_is_another(width: int, names: list[str]) -> None:
    view, _ = begun(width, names)
    train(view, names)
    found = lines(view, width)
    assert all(cell_len(line) <= width for line in found)
    assert len(found) <= 24
    rows = [line for line in found if any(state in line for state in (" done ", " waiting ", " step "))]
    assert len({line.split()[0] for line in rows}) == len(rows) >= min(len(names), 14)
    assert any("step 3/1200" in line for line in rows)
    assert not any("\x1b" in line or "\u202e" in line for line in found)


def test_whole_names_at_80_columns_where_they_fit() -> None:
    names = ["university-hospital-north", "university-hospital-south"]
    view, _ = begun(80, names)
    train(view, names)
    text = "\n".join(lines(view, 80))
    assert all(name in text for name in names)
    assert "…" not in text


def test_who_works_is_shown_and_the_others_are_counted_where_there_is_no_room() -> None:
    view, _ = begun(80, MANY)
    train(view, MANY)
    text = "\n".join(lines(view, 80))
    assert "step 3/1200" in text
    assert "and 36 more: 36 waiting" in text
    for name in MANY[3:]:
        view({"event": "step", "site": name, "step": 3, "steps": 1200, "loss": 1.25})
    assert "and 36 more: 33 at work, 3 done" in "\n".join(lines(view, 80))
    tall, _ = begun(80, MANY, height=70)
    train(tall, MANY)
    assert "more:" not in "\n".join(lines(tall, 80))


@pytest.mark.parametrize("width", WIDTHS)
def test_what_loads_is_said_until_the_first_round(width: int) -> None:
    view, _ = begun(width, LONG)
    view(loading_event("model sam vit_b"))
    assert lines(view, width)[0].startswith("loading model sam vit_b ...")
    view(loading_event("data", LONG[0]))
    assert any("loading data" in line for line in lines(view, width))
    train(view, LONG)
    assert not any("loading" in line for line in lines(view, width))
    assert lines(view, width)[0].startswith("round 4/9")


def test_a_pipe_has_a_line_for_all_that_loads_however_many_load_it() -> None:
    view, console = begun(80, MANY, terminal=False)
    with view:
        view(loading_event("model sam [red]\x1b[31m"))
        for name in MANY:
            view(loading_event("data", name))
    assert console.file.getvalue().splitlines() == ["loading model sam [red]\\x1b[31m ...", "loading data ..."]


def test_a_site_that_a_round_does_not_ask_does_not_look_done() -> None:
    view, _ = begun(80, ["a", "b"])
    train(view, ["a", "b", "c", "d"])
    view({"event": "round", "round": 4, "phase": 0, "phases": 1, "sites": ["a"]})
    states = {line.split()[0]: line.split()[1] for line in lines(view, 80) if line.strip()[:2] in ("a ", "b ")}
    assert states["a"] == "waiting"
    assert states["b"] not in ("waiting", "done")
