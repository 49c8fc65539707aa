"""The site of documentation builds without a warning, asks no other server for anything, and its links lead somewhere."""

import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from itertools import product
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from consilium.adapters.registry import ADAPTERS
from consilium.models.registry import MODELS
from consilium.strategies.registry import STRATEGIES
from consilium.tasks.registry import TASKS
from tests.pages.reading import PAGES, ROOT

pytestmark = pytest.mark.slow


class Page(HTMLParser):
    """What a page loads, where its links lead, and what a link may name in it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loads, self.links, self.names = list[str](), list[str](), set[str]()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.names |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        elif one := found.get("src") or (found.get("href") if tag == "link" else None):
            self.loads.append(one)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    nowhere = {f"{scheme}_proxy": "http://127.0.0.1:9" for scheme in ("http", "https")}  # a download would fail
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        env=os.environ | nowhere | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "WARNING" not in done.stderr, done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}


def test_every_page_and_kind_is_on_the_site(site: Path, pages: dict[Path, Page]) -> None:
    html = {site / page.replace("README.md", "index.html").replace(".md", ".html") for page in PAGES}
    assert html - set(pages) == set()
    for room, registry in (("strategies", STRATEGIES), ("models", MODELS), ("tasks", TASKS), ("adapters", ADAPTERS)):
        assert set(registry) - pages[site / "api" / f"{room}.html"].names == set()


def test_no_page_loads_anything_from_elsewhere(site: Path, pages: dict[Path, Page]) -> None:
    loads = {one for page in pages.values() for one in page.loads if not one.startswith("data:")}
    assert [one for one in loads if urlsplit(one).netloc] == []
    styles = "".join(path.read_text(encoding="utf-8") for path in site.rglob("*.css"))
    assert not [part[:80] for part in styles.split("url(")[1:] if part.lstrip("'\"").startswith(("http", "//"))]
    assert "@import" not in styles


def test_links_lead_somewhere(pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        for link in [*page.links, *page.loads]:
            place = urlsplit(link)
            if place.scheme or place.netloc:
                continue
            target = (path.parent / unquote(place.path)).resolve() if place.path else path
            target = target / "index.html" if target.is_dir() else target
            assert target.exists(), f"{path.name}: {link}"
            if place.fragment and target in pages:
                assert unquote(place.fragment) in pages[target].names | {"__top"}, f"{path.name}: {link}"


def test_search_works_from_a_folder_on_a_disk(site: Path, pages: dict[Path, Page], tmp_path: Path) -> None:
    """A browser loads the index as a script, since it may not fetch files."""
    index = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    found = json.loads(index.removeprefix("var __index = "))["docs"]
    assert {path.relative_to(site).as_posix() for path in pages} & {one["location"] for one in found} > {"jobs/fields.html"}
    dom = browsed(f"{(site / 'jobs/index.html').as_uri()}?q=MOVER", tmp_path)
    assert re.search(r'<a href="[^"]*compare.html[^"]*" class="md-search-result__link"', dom)


LOOKED_AT = ("index", "jobs/index", "jobs/fields", "jobs/algorithms", "api/strategies", "provisioning/engineer")
MEASURE = """<pre id="said"></pre><script>
onload = () => setTimeout(() => {
  document.getElementById("said").textContent = JSON.stringify([...document.querySelectorAll("iframe")].map(frame => {
    const inside = frame.contentDocument, pictures = [...inside.querySelectorAll("article img")];
    return [frame.id, inside.documentElement.clientWidth, inside.documentElement.scrollWidth, inside.body.dataset.mdColorScheme,
      inside.querySelector("h1").getBoundingClientRect().right, Math.min(...pictures.map(one => one.naturalWidth), 1000)];
  }));
}, 2000);
</script>"""


@pytest.mark.parametrize(("light", "scheme"), [("light", "default"), ("dark", "slate")])
def test_pages_fit_three_widths(light: str, scheme: str, site: Path, tmp_path: Path) -> None:
    frames = ""
    for name, width in product(LOOKED_AT, (400, 800, 1200)):
        source = (site / f"{name}.html").as_uri()
        frames += f'<iframe id="{name}" src="{source}" style="border: 0; width: {width}px; color-scheme: {light}"></iframe>'
    (tmp_path / "frames.html").write_text(frames + MEASURE)
    dom = browsed((tmp_path / "frames.html").as_uri(), tmp_path / "profile", "--allow-file-access-from-files")
    said = json.loads(re.findall(r'<pre id="said">(.*?)</pre>', dom)[0])
    assert len(said) == 3 * len(LOOKED_AT)
    for name, width, inside, shown, heading, picture in said:
        assert (inside, shown) == (width, scheme), f"{name} scrolls to the side or has the wrong colours"
        assert heading <= width
        assert picture > 0, f"{name}: a picture was not loaded"


def browsed(address: str, profile: Path, *more: str) -> str:
    """Return an address as a browser without a window has it in the end."""
    if (chromium := shutil.which("chromium")) is None:
        pytest.skip("no Chromium here")
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", f"--user-data-dir={profile}", *more]
    return subprocess.run([chromium, *words, "--dump-dom", address], capture_output=True, text=True, check=True).stdout
