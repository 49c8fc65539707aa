"""`consilium report`: what is on the page, that it needs nothing, and that nothing strange gets onto it."""

import html
import json
import os
import re
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
from PIL import Image

from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.core.errors import ConfigError
from consilium.core.messages import Stage
from consilium.federation.job_assembly import assemble_job
from consilium.report.compare.comparability import group_comparable
from consilium.report.compare.tables import comparison_tables
from consilium.report.page import run_page as run_pages, site_section
from consilium.report.page.run_page import ledger_path, run_page, site_page, study_page
from consilium.report.run_record import read_finished_run, read_run
from consilium.runtime.engine import simulate
from tests.conftest import run, small_cells, small_config, small_text
from tests.report.pages import SITES, Page, make_run
from tests.report.runs import make

EVIL = "<img src=x onerror=alert(1)>"
CSS = Path("custom/consilium/report/page/templates/page.css")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture(scope="module")
def page(folder: Path) -> Page:
    return Page(run_page(read_run(folder)))


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the figures, which take most of a page's time."""
    for place, name in (
        (run_pages, "draw_curves"),
        (run_pages, "score_intervals_figure"),
        (site_section, "distribution_figure"),
    ):
        monkeypatch.setattr(place, name, lambda *values: None)


def add(folder: Path, *lines: object) -> None:
    with open(folder / "metrics.jsonl", "a") as file:
        file.writelines((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)


def test_a_page_has_every_part_of_the_run(page: Page) -> None:
    ids = [one["id"] for one in page.of("h2")]
    assert ids == ["result", "curves", "sites", "training", "privacy", "versions"]
    for told in ("0.500", "0.600", "0.700", "0.650–0.750", "mean by n", "Best: a.png", "Worst: c.png", "4.0 s"):
        assert told in page.text, told
    assert "no differential privacy" in page.text
    assert page.source.count("data:image/jpeg") == 2 * 3 * 4  # sites, cases, the reference and three models


def test_what_travelled_is_summed_by_site(page: Page) -> None:
    text = re.sub(r"\s+", " ", page.text)
    assert "Training at the sites" in text
    assert text.count("2.00 KiB") >= 2  # two updates of 1 KiB from each of two sites
    assert text.count("8.00 KiB") == 1  # what both received in two rounds


def test_a_page_needs_nothing_from_elsewhere(page: Page) -> None:
    active = "script link iframe object embed base form foreignobject"
    assert {tag for tag, _ in page.tags}.isdisjoint(active.split())
    pairs = [pair for _, attributes in page.tags for pair in attributes.items()]
    sources = [value for name, value in pairs if name in ("src", "href", "xlink:href")]
    assert sources
    assert [one[:40] for one in sources if not one.startswith(("data:image/", "#"))] == []
    assert re.findall(r"https?:|@import|url\((?!#)", page.source) == []
    assert [name for name, _ in pairs if name.startswith("on")] == []
    assert "default-src 'none'" in page.of("meta")[2]["content"]


def test_a_page_can_be_read_aloud_and_walked_by_keys(page: Page) -> None:
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch(r"h\d", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert [(a, b) for a, b in pairwise(levels) if b > a + 1] == []
    assert page.of("html") == [{"lang": "en"}]
    assert all(len(one["alt"]) > 10 for one in page.of("img"))
    assert all(len(one["aria-label"]) > 20 and one["role"] == "img" for one in page.of("svg"))
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {one["href"][1:] for one in page.of("a")} <= set(ids)
    assert all(one.get("scope") in ("col", "row") for one in page.of("th"))
    scrolls = [one for one in page.of("div") if one.get("class") == "scroll"]
    assert scrolls
    assert all(one["tabindex"] == "0" and one["aria-label"] for one in scrolls)


def _colours(block: str) -> dict[str, str]:
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))


def _contrast(one: str, other: str) -> float:
    """Return WCAG 2's contrast ratio of two colours."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark", "print"])
def test_texts_and_lines_stand_out_from_the_ground(scheme: str) -> None:
    blocks = re.findall(r":root \{[^}]*\}", (ROOT / CSS).read_text())
    assert len(blocks) == 3
    found = _colours(blocks[0]) | _colours(blocks[["light", "dark", "print"].index(scheme)])
    assert _contrast("#000000", "#ffffff") == pytest.approx(21)
    for text in ("text", "soft", "link", "warn"):
        assert _contrast(found[text], found["back"]) >= 4.5, text
    assert _contrast(found["text"], found["panel"]) >= 4.5
    assert _contrast(found["text"], found["warn-back"]) >= 4.5
    for line in ("focus", *(f"c{number}" for number in range(1, 9))):
        assert _contrast(found[line], found["back"]) >= 3, line


def test_names_and_reasons_of_others_are_text(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    reason, result = (
        "</p><script>alert(1)</script>\u202e\x1b[31m",
        {"event": "result", "site": 'font: "; id="x" $x$', "phase": 0},
    )
    add(folder, {"event": "refused", "site": EVIL, "round": 1, "reason": reason, "time": 1.0})
    add(folder, *(result | {"round": r, "metrics": {"train/loss": 1.0 + r}, "time": 1.0} for r in (0, 1)))
    cases = folder / "sites/north/cases.json"
    raw = json.loads(cases.read_text())
    cases.write_text(json.dumps(raw | {"units": [EVIL, "b", "c"], "score": EVIL, "classes": [EVIL], "job": EVIL}))
    page = Page(run_page(read_run(folder)))
    assert EVIL in page.text
    assert page.of("script") == []
    assert all(one["src"].startswith("data:image/jpeg;base64,") for one in page.of("img"))
    assert "\\u202e\\x1b[31m" in page.text
    assert not {"\u202e", "\x1b"} & set(page.source)
    assert [name for _, attributes in page.tags for name in attributes if name.startswith("on")] == []


@pytest.mark.usefixtures("undrawn")
def test_the_page_of_a_studys_run_says_which_of_its_runs_it_is(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    (folder / "cell.json").write_text(json.dumps({"state": "done", "labels": {"method": "IAT", "seed": "0"}}))
    title = read_run(folder).config.title
    assert f"<h1>{title}: method=IAT, seed=0</h1>" in run_page(read_run(folder))
    for damaged in ('{"labels": [1]}', "[]", "{"):
        (folder / "cell.json").write_text(damaged)
        assert f"<h1>{title}</h1>" in run_page(read_run(folder))


@pytest.mark.usefixtures("undrawn")
def test_damaged_lines_cost_themselves_only(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    add(folder, "{torn", "[1]", "null", '{"event": "result", "site": 7, "round": 0, "phase": 0, "metrics": {}}')
    add(folder, '{"event": "started", "round": 1e400, "phase": 0, "sites": ["north"]}', "[" * 100_000)
    add(folder, {"event": "final", "site": "north", "round": 2, "metrics": {"test/global/dice": "high", "x": float("nan")}})
    (folder / "versions.json").write_text("{")
    page = Page(run_page(read_run(folder)))
    assert "Damaged lines of metrics.jsonl: 7" in page.text
    assert "0.600" in page.text
    add(folder, '{"event": "parameters", "shared": 1, "local": 1, "frozen": 1}', '{"event": "resumed", "round": 2, "phase": 0}')
    assert "Damaged lines of metrics.jsonl: 8" in Page(run_page(read_run(folder))).text  # a line without its round


@pytest.mark.usefixtures("undrawn")
def test_damaged_files_are_named_and_cost_themselves_only(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    (folder / "results.json").write_text('{"north": 3}')
    (folder / "simulation.json").write_text('{"content": 1}')
    cases = folder / "sites/south/cases.json"
    cases.write_text(json.dumps(json.loads(cases.read_text()) | {"units": ["one"]}))  # of three
    page = Page(run_page(read_run(folder)))
    assert "Damaged files, left out: results.json, simulation.json." in page.text
    assert "cases.json is damaged, so nothing is shown of: south" in page.text
    assert page.source.count("data:image/jpeg") == 3 * 4  # the other site's
    with pytest.raises(ConfigError, match=r"results\.json: is damaged; delete its folder and run the job anew$"):
        read_finished_run(folder)
    (folder / "results.json").rename(tmp_path / "away.json")
    (folder / "results.json").symlink_to(tmp_path / "away.json")
    with pytest.raises(ConfigError, match=r"results\.json: is a link, which may lead anywhere; put the file itself there$"):
        read_finished_run(folder)


@pytest.mark.usefixtures("undrawn")
def test_a_run_that_has_not_ended_says_so_and_shows_validation(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", rounds=3)
    (folder / "results.json").unlink()
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:9]) + lines[9][:20])
    text = Page(run_page(read_run(folder))).text
    assert "The run has not ended" in text
    assert "1 of 3 rounds have ended" in text
    assert "validation split" in text


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("mark", ["owner", "no simulation"])
def test_no_picture_of_a_patient_is_on_the_page_of_a_server(tmp_path: Path, mark: str) -> None:
    """Whatever lies in the folder: a federation's run has an owner, and a simulation has its mark."""
    folder = make_run(tmp_path / "run", simulated=mark == "owner")
    if mark == "owner":
        (folder / "owner.json").write_text("{}")
    source = run_page(read_run(folder))
    assert "data:image" not in source
    assert "a.png" not in source
    with pytest.raises(ConfigError, match="server"):
        site_page(folder, "north")


@pytest.mark.usefixtures("undrawn")
def test_a_picture_is_a_plain_small_jpeg_or_none(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    place, secret = folder / "sites/north/cases", tmp_path / "secret.jpg"
    Image.new("RGB", (16, 16), (1, 2, 3)).save(secret)
    for number, name in enumerate(sorted(path.name for path in place.iterdir())):
        (place / name).unlink()
        if number == 0:
            (place / name).write_text("<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>")
        elif number == 1:
            (place / name).symlink_to(secret)
        elif number == 2:
            os.mkfifo(place / name)
        elif number == 3:
            (place / name).mkdir()
        elif number == 4:
            with open(place / name, "wb") as file:
                file.truncate(2**33)
        elif number == 5:
            Image.new("RGB", (3000, 8)).save(place / name)
            found = bytearray((place / name).read_bytes())
            start = found.index(b"\xff\xc0") + 5  # the height and width in its frame's header
            found[start : start + 4] = b"\xfd\xe8" * 2
            (tmp_path / "bomb.jpg").write_bytes(found)
            assert site_section._picture(tmp_path / "bomb.jpg") is None
        elif number == 6:
            Image.new("RGB", (16, 16)).save(place / name, "PNG")
    source = run_page(read_run(folder))
    assert source.count("data:image/jpeg") == 3 * 4  # the other site's
    assert "<script" not in source


@pytest.mark.usefixtures("undrawn")
def test_folders_that_are_links_are_not_entered(tmp_path: Path) -> None:
    other, folder = make_run(tmp_path / "other"), make_run(tmp_path / "run")
    (folder / "sites").rename(tmp_path / "away")
    (folder / "sites").symlink_to(other / "sites")
    assert "data:image" not in run_page(read_run(folder))
    (folder / "sites").unlink()
    (folder / "sites").mkdir()
    (folder / "sites/north").symlink_to(other / "sites/north")
    assert "data:image" not in run_page(read_run(folder))
    with pytest.raises(ConfigError, match="no such site"):
        site_page(folder, "north")


@pytest.mark.usefixtures("undrawn")
def test_a_hospital_gets_its_own_part_only(folder: Path) -> None:
    page = Page(site_page(folder, "south"))
    assert page.source.count("data:image/jpeg") == 3 * 4
    assert "south" in page.text
    assert "north" not in page.text
    assert "There is no audit.jsonl here" in page.text


@pytest.mark.usefixtures("undrawn")
def test_a_hospital_reads_what_left_it(tmp_path: Path) -> None:
    """A kit's folder: no record of the run, a state folder with runs in it, the ledger beside them."""
    run = make_run(tmp_path / "x").joinpath("sites", "north").rename(tmp_path / "state")
    place = tmp_path / "kit/_consilium/runs/first/sites/north"
    place.parent.mkdir(parents=True)
    run.rename(place)
    tensor = {"shape": [2, 3], "dtype": "float32", "bytes": 24, "norm": 2.5}
    line = {
        "time": 1.0,
        "kind": "train",
        "round": 0,
        "phase": 0,
        "tensors": {"a.lora_A": tensor},
        "metrics": {},
        "previous": "",
    }
    (place / "0123.4567").mkdir()
    (place / "0123.4567/audit.jsonl").write_text(json.dumps(line) + "\n[]\n")
    text = re.sub(r"\s+", " ", Page(site_page(tmp_path / "kit/_consilium/runs/first", "north")).text)
    for told in ("a.lora_A", "2x3", "24 B", "2.5 to 2.5", "line 2 does not follow", "There is no ledger here"):
        assert told in text, told
    settings = tmp_path / "kit/local/site.yaml"
    settings.parent.mkdir()
    for said, known in (("privacy: {ledger: ../mine.sqlite}", tmp_path / "kit/local/../mine.sqlite"), ("privacy: 3", None)):
        settings.write_text(said)
        (tmp_path / "kit/mine.sqlite").touch()
        assert ledger_path(place) == known


@pytest.mark.usefixtures("undrawn")
def test_the_command_writes_for_the_user_alone_and_says_what_is_wrong(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    target = tmp_path / "out.html"
    (tmp_path / "study/cells").mkdir(parents=True)
    assert run(monkeypatch, "report", folder, "--site", SITES[0], "-o", target) == 0
    assert target.stat().st_mode & 0o777 == 0o600
    for words, told in (
        ((tmp_path / "none",), "no such folder"),
        ((tmp_path,), "holds no run"),
        ((tmp_path / "study",), "is a study's; its page is of `consilium compare STUDY -o report.html`"),
        ((folder, "--site", "\x1b[31m"), "no such site"),
        ((folder, "-o", tmp_path), "is a folder"),
        ((folder / "sites/..", "--site", ".."), "no such site"),
    ):
        capsys.readouterr()
        assert run(monkeypatch, "report", *words) == 2
        said = capsys.readouterr().err
        assert told in said
        assert said.count("\n") == 1
        assert "\x1b" not in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "score", "pictures"),
    [
        (small_config(rounds=1), "dice", 2 * 4),  # one test picture is the best, and no other is shown
        (small_cells(rounds=1), "", 2 * 3),
        (small_text(rounds=1), "loss", 0),
    ],
    ids=["pictures", "classes", "texts"],
)
def test_a_run_of_every_task_becomes_a_page(config: JobConfig, score: str, pictures: int, tmp_path: Path) -> None:
    events: list[dict] = []
    simulate(assemble_job(config), {site: SiteConfig() for site in SITES}, tmp_path, lambda event: events.append(dict(event)))
    assert [event for event in events if event["event"] == "undrawn"] == []
    results = json.loads((tmp_path / "results.json").read_text())
    for site in SITES:
        kept = json.loads((tmp_path / "sites" / site / "cases.json").read_text())
        assert set(kept["values"]) == {"pretrained", "global", "personalized"}
        for stage, values in kept["values"].items() if score else ():
            assert sum(values) / len(values) == pytest.approx(results[site][f"test/{stage}/{score}"], rel=1e-4)
    page = run_page(read_run(tmp_path))
    assert page.count("data:image/jpeg") == pictures
    assert page.count("<h4>Best:") == 2
    assert "Best" in site_page(tmp_path, SITES[0])


MEASURE = """<!doctype html><html><body style="margin: 0"><pre id="said"></pre>
{frames}
<script>
function measured(frame) {{
  const inside = frame.contentDocument, root = inside.documentElement, view = frame.contentWindow;
  const tables = [...inside.querySelectorAll(".scroll")].map(one => {{
    const box = one.getBoundingClientRect(), table = one.querySelector("table").getBoundingClientRect();
    return [box.right, table.right, view.getComputedStyle(one).overflowX];
  }});
  const free = [...inside.querySelectorAll("body *:not(.skip)")].filter(one => !one.closest(".scroll, svg, pre"));
  const times = [...inside.querySelectorAll(".messages tbody th")].map(one => {{
    const range = inside.createRange();
    range.selectNodeContents(one);
    return new Set([...range.getClientRects()].map(box => box.top)).size;
  }});
  return {{ name: frame.id, width: frame.clientWidth, root: [root.clientWidth, root.scrollWidth], tables, times,
    right: Math.max(...free.map(one => one.getBoundingClientRect().right)),
    svg: Math.max(0, ...[...inside.querySelectorAll("main svg")].map(one => one.getBoundingClientRect().right)),
    dark: view.matchMedia("(prefers-color-scheme: dark)").matches, back: view.getComputedStyle(inside.body).backgroundColor }};
}}
onload = () => {{
  document.getElementById("said").textContent = JSON.stringify([...document.querySelectorAll("iframe")].map(measured));
}};
</script>"""
"""Shows pages in frames of several widths, and writes where their tables, texts and figures end."""
BACK = {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 27)", "print": "rgb(255, 255, 255)"}
TENSOR = "vision_model.encoder.layers.11.attention.q_proj.lora_A"


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a study's, a run's and a site's page, each with tables wider than a screen."""
    place = tmp_path_factory.mktemp("shown")
    scores = {f"hospital of the town number {i}": 0.5 + 0.01 * i for i in range(9)}
    runs = [
        read_finished_run(make(place / f"{name}-{seed}", scores, name, seed), f"{name}-{seed}", {"method": f"a method, {name}"})
        for name in ("fedit", "ffa_lora")
        for seed in range(3)
    ]
    groups, _ = group_comparable(runs)
    folder = make_run(place / "run", rounds=3)
    tensor = {"shape": [8, 1024], "dtype": "float32", "bytes": 100000, "norm": 2.5}
    metrics = {f"test/personalized/recall/class {i}": 0.123456 for i in range(9)}
    line = {"time": 1.7e9, "kind": "train", "round": 0, "phase": 0, "tensors": {TENSOR: tensor}, "metrics": metrics}
    (folder / "sites" / SITES[0] / "audit.jsonl").write_text(json.dumps(line | {"previous": ""}) + "\n")
    texts = {
        "study": study_page("s", "here", groups, comparison_tables(groups, Stage.GLOBAL), [], Stage.GLOBAL, ""),
        "run": run_page(read_run(folder)),
        "site": site_page(folder, SITES[0]),
    }
    for name, text in texts.items():
        (place / f"{name}.html").write_text(text)
    return {name: place / f"{name}.html" for name in texts}


@pytest.fixture
def browser(tmp_path: Path) -> list[str]:
    """Return the command of a browser without a window."""
    if (found := shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")) is None:
        pytest.skip("no Chromium here")
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000", "--window-size=1300,1000"]
    return [found, *words, f"--user-data-dir={tmp_path / 'profile'}"]


@pytest.mark.slow
@pytest.mark.parametrize("media", list(BACK))
def test_wide_tables_scroll_inside_the_page_and_are_printed_whole(
    media: str, shown: dict[str, Path], browser: list[str], tmp_path: Path
) -> None:
    """A browser lays the pages out; 688 pixels are A4 between the page's margins."""
    frames = ""
    for name, path in shown.items():
        text = path.read_text()
        if media == "print":
            text = text.replace("@media screen", "@media (width: 1px)").replace("@media print", "@media all")
        for width in (688,) if media == "print" else (400, 800, 1200):
            style = f"border: 0; width: {width}px; height: 20000px; color-scheme: {media if media == 'dark' else 'light'}"
            frames += f'<iframe id="{name}" style="{style}" srcdoc="{html.escape(text)}"></iframe>\n'
    (tmp_path / "frames.html").write_text(MEASURE.format(frames=frames))
    told = subprocess.run([*browser, "--dump-dom", str(tmp_path / "frames.html")], capture_output=True, check=True)
    said = json.loads(re.findall(r'<pre id="said">(.*?)</pre>', told.stdout.decode())[0])
    assert len(said) == len(shown) * (1 if media == "print" else 3)
    for one in said:
        width, tables = one["width"], one["tables"]
        assert one["root"] == [width, width], f"{one['name']}: the page itself never scrolls to the side"
        assert max(one["right"], one["svg"]) <= width + 1, one["name"]
        assert (one["dark"], one["back"]) == (media == "dark", BACK[media])
        assert len(tables) == {"study": 3, "run": 2, "site": 4}[one["name"]]
        for right, end, overflow in tables:
            assert right <= width
            assert end <= right + 1 or (media != "print" and overflow == "auto")
        if media != "print" and (width == 400 or one["name"] == "study"):
            assert tables[0][1] > width, "the first table is wider than the page, else this shows nothing"
        if media != "print":
            assert one["times"] == [1] * (one["name"] == "site"), "the time of a message is one line"


@pytest.mark.slow
def test_a_printed_page_has_every_column_and_no_heading_alone(
    shown: dict[str, Path], browser: list[str], tmp_path: Path
) -> None:
    """The browser's own PDF, read by poppler."""
    if shutil.which("pdftotext") is None:
        pytest.skip("no pdftotext here")
    headings = "Result|Learning curves|Site by site|Training and communication|Privacy|Versions and hashes|Messages sent|Tables"
    for name, path in shown.items():
        out = tmp_path / f"{name}.pdf"
        subprocess.run(
            [*browser, "--no-pdf-header-footer", f"--print-to-pdf={out}", str(path)], capture_output=True, check=True
        )
        text = subprocess.run(["pdftotext", "-layout", out, "-"], capture_output=True, check=True).stdout.decode()
        sheets = [sheet.strip().splitlines() for sheet in text.split("\f") if sheet.strip()]
        assert len(sheets) > 1
        assert [sheet[-1] for sheet in sheets if re.fullmatch(rf"\s*({headings})\s*", sheet[-1])] == []
        whole = " ".join(text.split())
        for part in {"study": ["by n rank", "number 8"], "run": ["job.yaml, as it ran"], "site": [TENSOR]}[name]:
            assert part in whole, part
