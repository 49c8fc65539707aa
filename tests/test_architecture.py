"""The rooms of the package and their imports: order, no circles, few late imports; one interface for algorithms."""

import ast
import gc
import re
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from itertools import accumulate
from pathlib import Path

import pytest

from consilium.strategies.registry import STRATEGIES

PACKAGE = Path(__file__).parents[1] / "custom" / "consilium"
FILES = sorted(PACKAGE.rglob("*.py"))
ORDER = (
    "core", "data", "models", "adapters", "tasks", "strategies", "config", "privacy", "training", "report", "federation",
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
        elif not isinstance(child, ast.expr):
            yield from imports(child)


def modules(statement: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(statement, ast.Import):
        return [alias.name for alias in statement.names]
    return [f"{statement.module}.{alias.name}" for alias in statement.names]


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree(path)))


@cache
def statements(path: Path) -> list[ast.Import | ast.ImportFrom]:
    return list(imports(tree(path)))


@pytest.fixture(autouse=True, scope="module")
def _no_collection() -> Iterator[None]:
    """Let the collector not walk the trees of the whole package again and again: three quarters of what parsing would cost."""
    gc.disable()
    yield
    gc.enable()
    for cached in (tree, nodes, statements):
        cached.cache_clear()


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


# the structure --------------------------------------------------------------------------------------------------------


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


KNOWN = {name_of(path): path for path in FILES}
LATE = {
    "use.mask_files": "needs the extra dicom",
    "use.predictor": "needs the extra dicom",
}
"""Modules with an import of ours that is not at the top, and why."""
MOST_TYPE_CHECKING = 12
MOST_MEMBERS = 14
ALGORITHMS = set(STRATEGIES)


def targets(statement: ast.Import | ast.ImportFrom) -> set[str]:
    """Return the modules of ours that a statement imports."""
    named = [[*accumulate(name.split("."), "{}.{}".format)] for name in modules(statement)]  # a, a.b, a.b.c
    return {max(found, key=len) for names in named if (found := KNOWN.keys() & set(names))}


def test_no_module_imports_itself_through_others() -> None:
    """Late imports count; imports for types alone do not run."""
    graph = {name: set().union(*map(targets, statements(path))) - {name} for name, path in KNOWN.items()}
    list(TopologicalSorter(graph).static_order())  # raises CycleError


def test_imports_of_ours_are_at_the_top_but_for_these() -> None:
    found = set[str]()
    for name, path in KNOWN.items():
        top = set(map(id, tree(path).body))
        found_here = (node for node in nodes(path) if isinstance(node, ast.Import | ast.ImportFrom))
        if any(id(node) not in top and targets(node) for node in found_here):
            found.add(name.removeprefix("consilium."))
    assert found == set(LATE)


def test_few_modules_import_for_types_alone() -> None:
    assert sum("TYPE_CHECKING" in path.read_text() for path in FILES) <= MOST_TYPE_CHECKING


def test_flares_code_is_replaced_in_one_file() -> None:
    """No attribute of something of nvflare's is set elsewhere."""
    found = set[str]()
    for path in (path for path in FILES if "nvflare" in path.read_text()):
        imports_of_flare = [
            s for s in statements(path) if isinstance(s, ast.ImportFrom) and str(s.module).startswith("nvflare")
        ]
        theirs = {alias.asname or alias.name for s in imports_of_flare for alias in s.names}
        goals = [goal for node in nodes(path) if isinstance(node, ast.Assign) for goal in node.targets]
        sets = [g for g in goals if isinstance(g, ast.Attribute) and isinstance(g.value, ast.Name) and g.value.id in theirs]
        calls = [node for node in nodes(path) if isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr"]
        if sets or calls:
            found.add(path.name)
    assert found == {"patches.py"}


def test_an_algorithm_has_few_public_members() -> None:
    (strategy,) = (
        node
        for node in nodes(PACKAGE / "strategies" / "strategy.py")
        if isinstance(node, ast.ClassDef) and node.name == "Strategy"
    )
    names = [node.name for node in strategy.body if isinstance(node, ast.FunctionDef)]
    names += [ast.unparse(node.target) for node in strategy.body if isinstance(node, ast.AnnAssign)]
    assert len([name for name in names if not name.startswith("_")]) <= MOST_MEMBERS


def test_no_other_room_asks_for_an_algorithm_by_name() -> None:
    """What an algorithm can do is a trait, which any other may state too."""
    asked = set[str]()
    for path in (path for path in FILES if room(path) != "strategies"):
        for node in nodes(path):
            sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
            if any(isinstance(side, ast.Constant) and side.value in ALGORITHMS for side in sides):
                asked.add(f"{path.name}:{node.lineno}")
    assert asked == set()


def lazy_names(path: Path) -> Iterator[str]:
    """Yield the "module:name" of every function that a file calls by text. A module may be a constant of the file."""
    texts = {
        target.id: statement.value.value
        for statement in tree(path).body
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant)
        for target in statement.targets
        if isinstance(target, ast.Name)
    }
    inside = {id(part) for node in nodes(path) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes(path):
        if isinstance(node, ast.JoinedStr):
            constants = [getattr(getattr(part, "value", None), "id", None) for part in node.values]
            text = "".join(
                str(part.value) if isinstance(part, ast.Constant) else str(texts.get(name or "", "{}"))
                for part, name in zip(node.values, constants, strict=True)
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            text = node.value
        else:
            continue
        if re.fullmatch(r"consilium(\.\w+)+:\w+", text):
            yield text


def test_every_function_called_by_a_text_exists() -> None:
    """A renamed function left the pages of a site without what left."""
    found = {text for path in FILES for text in lazy_names(path)}
    assert "consilium.report.page.run_page:study_page" in found
    for text in sorted(found):
        module, _, name = text.partition(":")
        place = PACKAGE.parent / module.replace(".", "/")
        file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        assert file.is_file(), text
        body = tree(file).body
        own = {getattr(statement, "name", "") for statement in body}
        own |= {alias.asname or alias.name for one in body if isinstance(one, ast.ImportFrom) for alias in one.names}
        own |= {
            target.id for one in body if isinstance(one, ast.Assign) for target in one.targets if isinstance(target, ast.Name)
        }
        assert name in own, text
