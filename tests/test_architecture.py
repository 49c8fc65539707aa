"""The rooms of the package: how many there are and which may import which."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "custom" / "consilium"
FILES = sorted(PACKAGE.rglob("*.py"))
ORDER = (
    "core", "data", "models", "tasks", "adapters", "strategies", "config", "privacy", "training", "report", "federation",
    "estimates", "client", "server", "runtime", "use", "study", "flare", "cli",
)  # fmt: skip
"""Each room may import those before it."""
MOST_ROOMS = 19


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


def test_the_reader_of_imports_sees_what_runs_and_leaves_out_what_only_types_need() -> None:
    source = "if TYPE_CHECKING:\n    import a\nelse:\n    import b\ndef f():\n    from c import d\nif x:\n    import e"
    assert [module for statement in imports(ast.parse(source)) for module in modules(statement)] == ["b", "c.d", "e"]
