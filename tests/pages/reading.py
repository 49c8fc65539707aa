"""What the pages hold: fenced blocks with the comment before them, links, words in backquotes."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DEPLOYMENT = [
    f"provisioning/{page}.md"
    for page in ("README", "engineer", "installation", "administrator", "security-officer", "data-protection-officer")
]
"""In the order in which a deployment goes: each page's commands take what those before have made."""
_BUILT = re.compile(r"(^|/)(\.[^/]*|runs|build)/|(CHANGELOG|RESULTS)\.md$")
PAGES = sorted(path for p in ROOT.rglob("*.md") if not _BUILT.search(path := p.relative_to(ROOT).as_posix()))

_FENCE = re.compile(r"(?:^<!-- not run: (?P<why>[^\n]+?) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)
_HOME = re.compile(r"# (?P<path>custom/\S+\.py)(?:, in (?P<mapping>[A-Z]+))?$")
_LINK = re.compile(r"\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block. `why`: the reason that it is not run; `line` is the first one after the fence, from 1."""

    page: str
    line: int
    language: str
    text: str
    why: str | None

    @property
    def first(self) -> str:
        """The first line."""
        return self.text.partition("\n")[0]

    @property
    def home(self) -> tuple[str, str | None] | None:
        """Where a Python block belongs: (file, None) for a whole file, (file, mapping) for a line of a mapping there."""
        found = _HOME.fullmatch(self.first) if self.language == "python" else None
        return (found["path"], found["mapping"]) if found else None


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str) -> Iterator[Block]:
    """Return a page's blocks in order."""
    text = text_of(page)
    for found in _FENCE.finditer(text):
        line = text.count("\n", 0, found.start("text")) + 1
        yield Block(page, line, found["language"], found["text"], found["why"])


def prose(page: str) -> str:
    """Return a page without its blocks."""
    return _FENCE.sub("", text_of(page))


def links(page: str) -> list[str]:
    """Return where a page's links lead, those to other machines left out."""
    return [one for one in _LINK.findall(prose(page)) if "://" not in one]


def anchors(page: str) -> set[str]:
    """Return what a link may name in a page, as GitHub makes it of headings."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def code(page: str) -> list[str]:
    """Return a page's words in backquotes."""
    return re.findall(r"`([^`\n]+)`", prose(page))
