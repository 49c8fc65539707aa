"""Break the code in one place at a time, and count how often the tests that reach the place fail.

    python -m tests.tools.mutants --rooms custom/consilium/strategies --tests tests/strategies --seed 0 --count 10

1. Record once which statements each test reaches and how long it takes. The record is renewed for test files that changed, and
   whole when the code changed.
2. Draw the same number of mutants in each room, by the seed. A larger count keeps those of a smaller one.
3. Run each mutant in a copy of the tree, with the tests that reach it, the likeliest first, until one fails or `--seconds` of
   tests are spent. A mutant counts as killed where a test takes three times the longest unbroken one's time and 20 s more.

All state lies in `--state`: an interrupted call, repeated, goes on where it was. `--again` runs the survivors once more.
Linux only: each mutant is a fork of a process that has loaded torch and the other libraries.
"""

import argparse
import ast
import copy
import hashlib
import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
OURS = ("consilium", "tests", "reach")  # modules that each process loads from its own copy of the tree

Swaps = dict[type[ast.AST], tuple[type[ast.AST], ...]]
SWAPS: Swaps = {
    ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt), ast.Gt: (ast.GtE, ast.LtE), ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,), ast.NotIn: (ast.In,), ast.And: (ast.Or,), ast.Or: (ast.And,),
    ast.Add: (ast.Sub,), ast.Sub: (ast.Add,), ast.Mult: (ast.Div,), ast.Div: (ast.Mult,),
    ast.FloorDiv: (ast.Mult,), ast.Mod: (ast.FloorDiv,), ast.Pow: (ast.Mult,), ast.BitAnd: (ast.BitOr,),
}  # fmt: skip
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any", "floor": "ceil", "ceil": "floor"}


@dataclass(frozen=True)
class Mutant:
    """A change of one place: bytes start to end of a file become `new`."""

    path: str
    statement: int  # the line on which the statement begins; 0 outside of functions
    line: int
    start: int
    end: int
    old: str
    new: str

    @property
    def key(self) -> str:
        """Return what a person reads: place, and what becomes what."""
        return f"{self.path}:{self.line}: {' '.join(self.old.split())}  ->  {' '.join(self.new.split())}"


def variants(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what a node can become. One place changes in each."""
    match node:
        case ast.Compare(ops=[op, *more]):
            yield from (ast.Compare(node.left, [swap(), *more], node.comparators) for swap in SWAPS[type(op)])  # type: ignore
        case ast.BinOp(op=ast.BitOr(), left=left, right=right):  # of two dicts the right one's values count
            yield from (ast.BinOp(right, ast.BitOr(), left), left, right)
        case ast.BinOp(op=ast.Div(), right=ast.Constant(value=str()) | ast.JoinedStr()):
            pass  # a path
        case ast.BinOp(op=op) if type(op) in SWAPS:
            yield from (ast.BinOp(node.left, swap(), node.right) for swap in SWAPS[type(op)])  # type: ignore
        case ast.BoolOp(op=op, values=values):
            yield from (ast.BoolOp(swap(), values) for swap in SWAPS[type(op)])  # type: ignore
            yield from values if len(values) == 2 else ()
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield operand
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield from (ast.Constant(value + 1), ast.Constant(value - 1))
        case ast.Constant(value=float(value)):
            yield from (ast.Constant(value * 2 if value else 1.0), ast.Constant(value + 1))
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in CALLS:
            changed = copy.deepcopy(node)
            setattr(changed.func, "id" if isinstance(changed.func, ast.Name) else "attr", CALLS[name])
            yield changed
        case ast.Subscript(slice=ast.Slice(), ctx=ast.Load(), value=value):
            yield value
        case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp() if any(g.ifs for g in node.generators):
            changed = copy.deepcopy(node)
            for generator in changed.generators:
                generator.ifs = []
            yield changed


def statement_variants(node: ast.stmt) -> Iterator[str]:
    """Yield what a statement of a function can become, as source."""
    match node:
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.Raise() | ast.Delete():
            yield "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "pass"
        case ast.AugAssign(op=op):
            yield "pass"
            for swap in SWAPS.get(type(op), ()):
                yield ast.unparse(ast.AugAssign(node.target, swap(), node.value))  # type: ignore
        case ast.Continue():
            yield "break"
        case ast.Break():
            yield "continue"


def mutants_of(path: str, source: str) -> Iterator[Mutant]:
    """Yield every mutant of a file. Annotations, docstrings and the text of messages stay as they are."""
    text = source.encode()
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def mutant(node: ast.expr | ast.stmt, statement: int, new: str) -> Mutant:
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        return Mutant(path, statement, node.lineno, start, end, text[start:end].decode(), new)

    def walk(node: ast.AST, statement: int, function: bool) -> Iterator[Mutant]:
        if isinstance(node, ast.stmt):
            statement = node.lineno if function else 0
            yield from (mutant(node, statement, new) for new in statement_variants(node) if function)
        if isinstance(node, ast.If | ast.IfExp) and ast.unparse(node.test) != "TYPE_CHECKING":
            yield mutant(node.test, statement, f"(not ({ast.unparse(node.test)}))")
        if isinstance(node, ast.expr):
            yield from (mutant(node, statement, f"({ast.unparse(new)})") for new in variants(node))
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list") or isinstance(node, ast.JoinedStr):
                continue
            inside = function or (isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and name == "body")
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from walk(child, statement, inside)

    yield from walk(ast.parse(source), 0, False)


def draw(room: Path, seed: int, count: int) -> list[Mutant]:
    """Return mutants of a room, one a statement, in an order that the seed fixes."""
    places: dict[tuple[str, int], list[Mutant]] = defaultdict(list)
    for path in sorted((ROOT / room).rglob("*.py")):
        for mutant in mutants_of(str(path.relative_to(ROOT)), path.read_text()):
            places[mutant.path, mutant.line].append(mutant)
    chance = random.Random(f"{seed} {room.name}")
    chosen = [chance.choice(places[place]) for place in sorted(places)]
    chance.shuffle(chosen)
    return chosen[:count]


def instrument(path: str, source: str) -> str:
    """Return a file's source with a call of reach.hit before every statement of a function."""
    tree = ast.parse(source)
    for node in list(ast.walk(tree)):
        for name in ("body", "orelse", "finalbody"):
            body = getattr(node, name, None)
            if isinstance(body, list) and not isinstance(node, ast.Module | ast.ClassDef):
                marked = [(ast.parse(f"__import__('reach').hit({f'{path}:{s.lineno}'!r})").body[0], s) for s in body]
                documented = isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None
                setattr(node, name, [x for i, pair in enumerate(marked) for x in (pair[1:] if documented and i == 0 else pair)])
    return ast.unparse(tree)


@dataclass(frozen=True)
class _Limit:
    """A pytest plugin that ends the process where a test takes too much processor time."""

    seconds: float

    def pytest_runtest_logstart(self) -> None:
        """Begin to count anew."""
        signal.setitimer(signal.ITIMER_PROF, self.seconds)


def in_fork(tree: Path, arguments: list[str], seconds: float, modules: set[str], **environment: str) -> int | None:
    """Run pytest in a fork of this process, in a copy of the tree. Return its exit code, or None if it took too long.

    `seconds`: of processor time that one test may take; all may take twenty times as long by the clock, for what waits for
    ever. The fork has the modules loaded already. Its output goes to output.txt beside the tree.
    """
    for name in sorted(modules - sys.modules.keys()):
        if name.split(".")[0] not in OURS:
            with suppress(Exception):
                importlib.import_module(name)
    child = os.fork()
    if child == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.chdir(tree)
        output = os.open(tree.parent / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        os.dup2(output, 1), os.dup2(output, 2)
        ours = [str(tree), str(tree / "custom"), str(tree / "tests" / "tools")]
        os.environ.update(environment, PYTHONPATH=os.pathsep.join(ours))
        for name in [name for name in sys.modules if name.split(".")[0] in OURS]:
            del sys.modules[name]
        sys.path[:] = ours + [path for path in sys.path if not Path(path).resolve().is_relative_to(ROOT)]
        options = ["-n0", "-q", "--tb=line", "-p", "no:cacheprovider", *arguments]
        os._exit(int(importlib.import_module("pytest").main(options, plugins=[_Limit(seconds)])))
    end, ended, status = time.monotonic() + 20 * seconds, 0, 0
    try:
        while not ended and time.monotonic() < end:
            time.sleep(0.05)
            ended, status = os.waitpid(child, os.WNOHANG)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # with what a test left behind
        if not ended:
            os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status) if ended else None
    return None if code == -signal.SIGPROF else code


def copied(tree: Path) -> Path:
    """Return a fresh copy of the working tree: the files that git knows or does not ignore."""
    shutil.rmtree(tree, ignore_errors=True)
    listed = subprocess.run(["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    return tree


@dataclass
class Reach:
    """Which tests reach which statement, and the seconds of processor time that a test, or a whole file, takes."""

    tests: dict[str, dict[str, None]]
    seconds: dict[str, float]
    modules: set[str]

    def add(self, test_file: str, record: Path) -> None:
        """Add the record of one test file. Tests that fail on unbroken code count for nothing."""
        lines = [line.split("\t") for line in record.read_text().splitlines()]
        failed = {fields[1] for fields in lines if fields[0] == "failed"}
        for kind, name, *rest in lines:
            if kind == "module":
                self.modules.add(name)
            elif kind == "test" and name not in failed:
                for key in (name, test_file):
                    self.seconds[key] = self.seconds.get(key, 0.0) + float(rest[-1])
            elif kind == "hit" and name not in failed:
                whole = name if "::" in name else test_file
                for place in (rest[0], rest[0].partition(":")[0]):
                    self.tests[place][whole] = None

    def select(self, mutant: Mutant, budget: float) -> list[str]:
        """Return the tests that reach a mutant, those of its own room and name first, as many as fit into the seconds."""
        room, stem = Path(mutant.path).parts[-2], Path(mutant.path).stem

        def likely(test: str) -> tuple[bool, bool, float]:
            path = Path(test.partition("::")[0])
            return room not in path.parts, stem not in path.stem, self.seconds.get(test, 0.0)

        found = self.tests.get(f"{mutant.path}:{mutant.statement}" if mutant.statement else mutant.path, {})
        chosen: list[str] = []
        for test in sorted(found, key=likely):
            budget -= self.seconds.get(test, 0.0)
            if chosen and budget < 0:
                break
            chosen.append(test)
        files = list(dict.fromkeys(test.partition("::")[0] for test in chosen))
        return sorted(
            (t for t in chosen if "::" not in t or t.partition("::")[0] not in chosen),
            key=lambda t: files.index(t.partition("::")[0]),
        )


def recorded(state: Path, rooms: list[Path], folders: list[Path]) -> Reach:
    """Return what the tests reach, after running those test files that have no record of this code and these tests."""
    sources = sorted(path.relative_to(ROOT) for room in rooms for path in (ROOT / room).rglob("*.py"))
    files = [path.relative_to(ROOT) for folder in folders for path in sorted((ROOT / folder).rglob("test_*.py"))]
    code = hashlib.sha256(b"".join(str(path).encode() + (ROOT / path).read_bytes() for path in sources))
    reach, tree = Reach(defaultdict(dict), {}, {"torch"}), None
    (state / "records").mkdir(parents=True, exist_ok=True)
    for number, file in enumerate(files, 1):
        digest = code.copy()
        digest.update(str(file).encode() + (ROOT / file).read_bytes())
        record = state / "records" / digest.hexdigest()[:20]
        if not record.exists():
            if tree is None:
                tree = copied(state / "instrumented")
                for path in sources:
                    (tree / path).write_text(instrument(str(path), (ROOT / path).read_text()))
            unfinished = state / "record.part"
            unfinished.unlink(missing_ok=True)
            shutil.copy2(ROOT / file, tree / file)  # as it is now: the copy may be older
            code_of_exit = in_fork(tree, ["-p", "reach", str(file)], 600, reach.modules, MUTANTS_RECORDS=str(unfinished))
            print(f"recorded {number} of {len(files)}: {file} (exit code {code_of_exit})", flush=True)
            if not unfinished.exists():
                continue
            unfinished.rename(record)
        reach.add(str(file), record)
    return reach


def run(mutant: Mutant, reach: Reach, tree: Path, budget: float) -> dict[str, object]:
    """Run the tests that reach a mutant. Return its outcome, and by which test it was killed."""
    tests = reach.select(mutant, budget)
    if not tests:
        return {"outcome": "survived", "by": "no test reaches it"}
    text = (ROOT / mutant.path).read_bytes()
    broken = text[: mutant.start] + mutant.new.encode() + text[mutant.end :]
    (tree / mutant.path).write_bytes(broken)
    os.utime(tree / mutant.path, (zlib.crc32(broken) // 2,) * 2)  # bytecode is stale by time and size: no two are alike
    expected = sum(reach.seconds.get(test, 0.0) for test in tests)
    began = time.monotonic()
    longest = max(reach.seconds.get(test, 0.0) for test in tests)
    code = in_fork(tree, ["-x", *tests], 20 + 3 * longest, reach.modules)
    shutil.copy2(ROOT / mutant.path, tree / mutant.path)
    output = (tree.parent / "output.txt").read_text(errors="replace")
    failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    outcome = {None: "timeout", 0: "survived"}.get(code, "killed")
    by = failed[0][:200] if failed else f"{len(tests)} tests, {expected:.0f} s"
    return {"outcome": outcome, "by": by, "seconds": round(time.monotonic() - began, 1)}


def report(drawn: dict[Path, list[Mutant]], results: dict[str, dict[str, object]]) -> None:
    """Print the survivors, and how many mutants of each room were killed."""
    rows = []
    for room, mutants in drawn.items():
        done = [mutant.key for mutant in mutants if mutant.key in results]
        alive = [key for key in done if results[key]["outcome"] == "survived"]
        late = sum(results[key]["outcome"] == "timeout" for key in done)
        rows.append((room.name, len(done), len(done) - len(alive), late))
        print(*(f"{key}    ({results[key]['by']})" for key in alive), sep="\n")
    rows.append(("all", *(sum(row[i] for row in rows) for i in (1, 2, 3))))  # type: ignore[misc]
    print(f"\n{'room':<14}{'mutants':>8}{'killed':>8}{'rate':>8}  of them by time")
    for name, count, killed, late in rows:
        print(f"{name:<14}{count:>8}{killed:>8}{100 * killed / max(count, 1):>7.1f}%  {late}")


def main() -> None:
    """Read the command line, run what has no result yet, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rooms", type=Path, nargs="+", required=True, help="folders of code to break")
    parser.add_argument("--tests", type=Path, nargs="+", required=True, help="folders of tests that may notice")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=10, help="mutants of each room")
    parser.add_argument(
        "--seconds", type=float, default=120, help="processor seconds of unbroken tests that one mutant may cost"
    )
    parser.add_argument("--state", type=Path, default=Path("/tmp/mutants"), help="folder of copies, records and results")
    parser.add_argument("--again", action="store_true", help="run the survivors once more")
    arguments = parser.parse_args()
    os.nice(10)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no fork stays behind
    state = arguments.state.resolve()
    drawn = {room: draw(room, arguments.seed, arguments.count) for room in arguments.rooms}
    reach = recorded(state, arguments.rooms, arguments.tests)
    path = state / "results.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    tree = copied(state / "tree")
    for mutants in zip(*drawn.values(), strict=False):  # a room at a time, so that an interrupted run has some of each
        for mutant in mutants:
            before = results.get(mutant.key)
            if before is None or (arguments.again and before["outcome"] == "survived"):
                results[mutant.key] = run(mutant, reach, tree, arguments.seconds)
                path.write_text(json.dumps(results, indent=1))
                print(f"{results[mutant.key]['outcome']:<9} {mutant.key}", flush=True)
    report(drawn, results)


if __name__ == "__main__":
    main()
