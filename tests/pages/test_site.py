"""The site of documentation builds without a warning, asks no other server for anything, and its links lead somewhere."""

import os
import subprocess
import sys
from html.parser import HTMLParser
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
