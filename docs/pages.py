"""Hooks of the site: pages from where they lie, what they link to, and the reference of the code.

The navigation in mkdocs.yml names pages by their paths in the repository. A page that they link to is on the site too, a
picture as it is, any other file as a page that shows its text. So a relative link leads to the same place on GitHub.
"""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PICTURES = {".png", ".svg"}
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".json": "json"}
KINDS = {
    "strategies": ("Algorithms", "strategy", ("strategy",)),
    "tasks": ("Tasks", "task", ("base", "registry")),
    "models": ("Models", "model", ("registry",)),
    "adapters": ("Adapters", "adapter", ("registry", "adapter_state")),
}
"""Pages of the reference by room: title, heading in jobs/fields.md, and what an author of a new kind works with."""
SHIM = "https://unpkg.com/iframe-worker/shim"
_CODE = re.compile(r"(^```\w*\n(?s:.*?)^```$|`[^`\n]+`)", re.M)
_LINK = re.compile(r"(\]\()([^)\s#]+)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Name headings as GitHub does."""
    config.mdx_configs["toc"]["slugify"] = lambda text, separator: re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", separator)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the navigation and all that they link to."""
    for room in KINDS:
        files.append(File.generated(config, f"api/{room}.md", content=_reference(room)))
    waiting, done = list(_named(config.nav)), set[str]()
    while waiting:
        path = waiting.pop()
        source = ROOT / path
        if path in done or path.startswith("api/"):
            continue
        done.add(path)
        if not source.exists():
            source = ROOT / path.removesuffix(".md")
            files.append(File.generated(config, path, content=_shown(source)))
        else:
            files.append(File.generated(config, path, abs_src_path=str(source)))
            waiting += [_place(path, link) for link in _links(source)] if path.endswith(".md") else []
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to files of code to the pages that show them."""
    if (ROOT / page.file.src_uri).suffixes != [".md"]:
        return markdown
    return "".join(part if place % 2 else _LINK.sub(_rewritten, part) for place, part in enumerate(_CODE.split(markdown)))


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Load the plug-in offline's shim from the site itself."""
    return output.replace(SHIM, os.path.relpath("iframe_worker.js", Path(page.file.dest_uri).parent))


def _named(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    for one in nav if isinstance(nav, list) else nav.values() if isinstance(nav, dict) else ():
        yield from _named(one)


def _links(page: Path) -> Iterator[str]:
    for part in _CODE.split(page.read_text(encoding="utf-8"))[::2]:
        yield from (link for _, link in _LINK.findall(part) if "://" not in link)


def _place(page: str, link: str) -> str:
    path = os.path.normpath(Path(page).parent / link)
    return path if Path(path).suffix in {".md", *PICTURES} else f"{path}.md"


def _rewritten(link: re.Match[str]) -> str:
    shown = link[2] if "://" in link[2] or Path(link[2]).suffix in {".md", *PICTURES} else f"{link[2]}.md"
    return link[1] + shown


def _shown(source: Path) -> str:
    """Return a file's text as a page; a notebook's cells and outputs as they follow each other."""
    text = source.read_text(encoding="utf-8")
    if source.suffix == ".ipynb":
        return "\n\n".join(part for cell in json.loads(text)["cells"] for part in _cell(cell))
    code = _fenced(text, LANGUAGES.get(source.suffix, "text"))
    return f"---\nsearch: {{exclude: true}}\n---\n# {source.name}\n\n`{source.relative_to(ROOT).as_posix()}`\n\n{code}\n"


def _cell(cell: dict[str, Any]) -> Iterator[str]:
    source = "".join(cell["source"])
    yield source if cell["cell_type"] == "markdown" else _fenced(source, "python")
    for output in cell.get("outputs", []):
        data = output.get("data", {})
        if "image/png" in data:
            picture = "".join("".join(data["image/png"]).split())
            yield f"![output of the cell above](data:image/png;base64,{picture})"
        elif said := "".join(output.get("text", data.get("text/plain", ""))):
            yield _fenced(said, "text")


def _fenced(text: str, language: str) -> str:
    return f"````{language}\n{text.rstrip()}\n````"


def _reference(room: str) -> str:
    """Return a room's page: what an author of a new kind works with, and the kinds in the order of the registry."""
    title, heading, modules = KINDS[room]
    registry = (ROOT / f"custom/consilium/{room}/registry.py").read_text(encoding="utf-8")
    kinds = re.findall(r'^ +"(\w+)": "([\w.]+):\w+",$', registry, re.M)
    about = "From the code's docstrings. [Recipes](../custom/recipes.md) say how to add one of your own."
    parts = [f"# {title}", about, *(f"::: consilium.{room}.{name}" for name in modules)]
    for name, module in kinds:
        fields = f"Its settings: [job.yaml](../jobs/fields.md#{heading})."
        parts += [
            f"## `{name}`",
            fields,
            f"::: {module}\n    options: {{show_root_heading: false, show_root_toc_entry: false, heading_level: 2}}",
        ]
    return "\n\n".join(parts) + "\n"
