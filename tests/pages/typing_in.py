"""Runs the commands of pages, in order, as a user types them at the root of a fresh copy; only marked blocks are left out.

Pages are shared out over three test files, which run beside each other.
"""

import subprocess
from pathlib import Path

from tests.pages.reading import DEPLOYMENT, PAGES, Block, blocks

LONGEST = 600
"""Seconds that one block may take, on a machine that has other work too."""


def _runs(block: Block) -> bool:
    return block.why is None and block.language == "bash"


ALONE = [[page] for page in PAGES if page not in DEPLOYMENT and any(_runs(block) for block in blocks(page))]
JOBS = [pages for pages in ALONE if pages[0].startswith("jobs/")]
ROOMS = [pages for pages in ALONE if pages[0].startswith("custom/consilium/")]
OTHERS = [*(pages for pages in ALONE if pages not in JOBS + ROOMS), DEPLOYMENT]


def type_all(pages: list[str], copy: Path, environment: dict[str, str]) -> None:
    """Run what there is to run of these pages, one after the other."""
    for block in (block for page in pages for block in blocks(page)):
        if block.home:
            _put(copy, block)
        elif block.language == "yaml" and block.first.endswith((": a job.yaml", ": a study")):
            (copy / block.first.removeprefix("# ").partition(":")[0]).write_text(block.text)
        elif _runs(block):
            type_in(block, copy, environment)


def _put(copy: Path, block: Block) -> None:
    """Write a Python block where its first line says: a whole file, or lines at the beginning of a mapping in one."""
    assert block.home
    path, mapping = copy / block.home[0], block.home[1]
    if mapping is None:
        assert not path.exists(), f"{block.page}:{block.line}: {block.home[0]} is there already"
        path.write_text(block.text)
        return
    before, opening, after = path.read_text().partition(f"{mapping}: ")
    head, brace, rest = after.partition("    {\n")
    assert brace, f"{block.page}:{block.line}: no mapping {mapping} in {block.home[0]}"
    path.write_text(before + opening + head + brace + block.text.partition("\n")[2] + rest)


def type_in(block: Block, copy: Path, environment: dict[str, str]) -> None:
    """Run a block."""
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.text],
        cwd=copy,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LONGEST,
    )
    said = f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert done.returncode == 0, f"{block.page}:{block.line}: exit {done.returncode}\n{said}"
