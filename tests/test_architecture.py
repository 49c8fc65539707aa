"""The rooms of the package: how many, who may look at whom, how long a file may be, and which words are gone."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "custom" / "consilium"
FILES = sorted(PACKAGE.rglob("*.py"))
ORDER = (
    "errors", "seeding", "schema", "storage", "messages", "registry", "linalg", "data", "models", "tasks", "adapters",
    "strategies", "config", "privacy", "training", "report", "federation", "use", "study", "flare", "cli",
)  # fmt: skip
"""Each room may import those before it."""
MOST_ROOMS, MOST_LINES = 21, 300
GONE = ("Upload", "Switched", "PolicyConfig", "SitePrivacyConfig", "rematerialize", "Spend")
"""Words of former versions, not even in a text."""
RENAMED = ("conclude_mean", "pulls", "claim_base", "native", "mend", "ceiling")
"""Classes, functions and arguments of former versions."""
OLD_STAGES = ("base", "received", "personal")


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield every import that runs at some time: not those for type checkers only."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            yield from imports(ast.Module(body=child.orelse, type_ignores=[]))
        else:
            yield from imports(child)


def modules(statement: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(statement, ast.Import):
        return [alias.name for alias in statement.names]
    return [f"{statement.module}.{alias.name}" for alias in statement.names]


@cache
def statements(path: Path) -> list[ast.Import | ast.ImportFrom]:
    return list(imports(ast.parse(path.read_text())))


def imported(path: Path) -> list[str]:
    return [module for statement in statements(path) for module in modules(statement)]


def test_there_are_no_more_rooms_than_this_and_each_has_its_place() -> None:
    rooms = {room(path) for path in FILES} - {"__init__"}
    assert len(rooms) <= MOST_ROOMS
    assert rooms == set(ORDER)


def test_no_room_looks_up() -> None:
    arrows = [(path, module.split(".")[1]) for path in FILES for module in imported(path) if module.startswith("consilium.")]
    known = [(path, target) for path, target in arrows if {target, room(path)} <= set(ORDER)]
    assert len(known) > 300
    assert [f"{p.name} -> {target}" for p, target in known if ORDER.index(target) > ORDER.index(room(p))] == []


def test_only_flare_imports_nvflare() -> None:
    rooms = {room(path) for path in FILES for module in imported(path) if module.split(".")[0] == "nvflare"}
    assert rooms == {"flare"}


def test_imports_are_absolute() -> None:
    """The tests above read them by name."""
    assert [p.name for p in FILES for s in statements(p) if isinstance(s, ast.ImportFrom) and s.level] == []


def test_files_are_short() -> None:
    assert {str(p.relative_to(PACKAGE)) for p in FILES if len(p.read_text().splitlines()) > MOST_LINES} == set()


@cache
def names(path: Path) -> set[str]:
    """Return what a file defines: classes, functions and their arguments."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    named = {node.name for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    return named | {node.arg for node in nodes if isinstance(node, ast.arg)}


@cache
def texts(path: Path) -> set[str]:
    nodes = ast.walk(ast.parse(path.read_text()))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


@pytest.mark.parametrize("word", GONE)
def test_a_word_of_former_versions_is_gone(word: str) -> None:
    assert [path.name for path in FILES if re.search(rf"\b{word}\b", path.read_text())] == []


@pytest.mark.parametrize("word", RENAMED)
def test_a_name_of_former_versions_is_gone(word: str) -> None:
    assert [path.name for path in FILES if word in names(path)] == []


@pytest.mark.parametrize("stage", OLD_STAGES)
def test_a_stage_of_former_versions_is_in_no_score(stage: str) -> None:
    score = re.compile(rf"(.*/)?(validation|test)/{stage}(/.*)?")
    assert [path.name for path in FILES for text in texts(path) if score.fullmatch(text)] == []


def test_the_reader_of_imports_sees_what_runs_and_leaves_out_what_only_types_need() -> None:
    source = "if TYPE_CHECKING:\n    import a\nelse:\n    import b\ndef f():\n    from c import d\nif x:\n    import e"
    assert [module for statement in imports(ast.parse(source)) for module in modules(statement)] == ["b", "c.d", "e"]
