"""What jobs/README.md shows as printed is what its commands print: titles, headings and first columns, on smaller data."""

import re
import textwrap
from pathlib import Path

import pytest

from tests.conftest import run
from tests.data.test_importers_own import put
from tests.pages.reading import text_of
from tests.report.runs import make

PAGE = "jobs/README.md"
TEXTS = [textwrap.dedent(found[2]) for found in re.finditer(r"^( *)```text\n(.*?)^\1```$", text_of(PAGE), re.M | re.S)]
SMALL = [f"data.phantoms.{split}={count}" for split, count in (("training", 8), ("validation", 5), ("test", 10))]


def _masked(text: str) -> str:
    return re.sub(r"\d[\d.,–+e]*", "#", " ".join(text.split()))


def _parts(text: str) -> list[str]:
    """Return all cells of the headings of a printed text's tables, and the first cell of each other line."""
    lines = [line.strip() for line in text.splitlines() if line.strip() not in ("", "...")]
    found = []
    for line, below in zip(lines, [*lines[1:], ""], strict=True):
        cells = re.split(r"\s{2,}", line)
        if not line.startswith("─"):
            found += cells if below.startswith("─") else cells[:1]
    return found


def _commands(kind: str, folder: Path) -> tuple[str, list[object]]:
    """Return the first words of a text on the page, and a command that prints as the page's command does."""
    if kind == "compare":
        scores = {f"site-{number}": 0.5 for number in (1, 2, 3)}
        runs = [make(folder / name, scores, name) for name in ("fedit", "local_only")]
        return "Accuracy, global model", ["compare", *runs]
    if kind == "import":
        for site, number in ((site, number) for site in ("aachen", "bergen") for number in range(4)):
            put(folder / "raw", site, f"{number}")
        return "site     training", ["data", "import", "own", folder / "raw", folder / "lists"]
    if kind == "cost":
        return "trains: LoRA", ["cost", "jobs/fundus_fediat", "--set", "adapter.rank=16"]
    small = [word for setting in SMALL for word in ("--set", setting)]
    return "round 1/4", ["simulate", "jobs/quickstart_cells", "--rounds", 1, *small, "--workspace", folder / "runs/federated"]


KINDS = ("compare", "import", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("cost", "simulate")))


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_page_shows_as_printed_is_printed(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    first, words = _commands(kind, tmp_path)
    (text,) = [text for text in TEXTS if text.lstrip().startswith(first)]
    assert run(monkeypatch, *words) == 0
    printed = _masked(capsys.readouterr().out.replace(f"{tmp_path}/", ""))
    assert len(_parts(text)) >= 6
    assert [part for part in _parts(text) if _masked(part) not in printed] == []


def test_every_printed_text_is_compared_and_the_page_stays_short() -> None:
    assert len(TEXTS) == len(KINDS)
    assert len(text_of(PAGE).splitlines()) < 250
