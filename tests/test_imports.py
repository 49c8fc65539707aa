"""What a process loads: a command line and reading a job take no torch, and a server needs nothing of what only sites do."""

import ast
import gc
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from consilium.core.lazy import lazy

ROOT = Path(__file__).parents[1]
HEAVY = (
    "monai",
    "opacus",
    "transformers",
    "peft",
    "tokenizers",
    "matplotlib",
    "tensorboard",
    "segment_anything.predictor",
    "nibabel",
    "torch._dynamo",
)
READ = """
import sys
import consilium.cli.main, consilium.config.job
assert not {{*{heavy!r}, "torch", "numpy", "nvflare"}} & set(sys.modules)
from typer.testing import CliRunner
from consilium.adapters.registry import ADAPTERS
from consilium.cli.main import app
from consilium.models.registry import MODELS
from consilium.strategies.registry import STRATEGIES
from consilium.tasks.registry import TASKS
for registry in (ADAPTERS, MODELS, STRATEGIES, TASKS):
    assert [registry[name] for name in registry] and "torch" not in sys.modules, registry.what
for commands, heavy in (({light!r}, {{*{heavy!r}}}), ({draws!r}, {{*{heavy!r}}} - {{"matplotlib"}})):
    for words, module in commands:
        CliRunner().invoke(app, words)
        assert "consilium.cli." + module in sys.modules, words
        assert not heavy & set(sys.modules), (words, heavy & set(sys.modules))
"""
LIGHT = [
    (["--help"], "main"),
    (["simulate", "--help"], "simulate"),
    (["study", "list"], "study_list"),
    (["compare", "none"], "compare"),
    (["privacy", "plan", "--epsilon=8", "--rounds=2", "--accountant=exact"], "privacy_plan"),
    (["privacy", "ledger", "none"], "site_records"),
    (["audit", "none"], "site_records"),
    (["evidence", "none", "--kit=none"], "site_evidence"),
    (["sites", "--kit", "none"], "sites"),
    (["status", "--kit", "none"], "jobs"),
    (["metrics", "none"], "kits"),
]
DRAWS = [
    (["report", "none"], "compare"),
    (["data", "check", "none"], "data_lists"),
    (["data", "stats", "none"], "data_lists"),
]
SERVER = """
import consilium.flare.job.aggregator, consilium.flare.job.controller, consilium.flare.job.filters
from pathlib import Path
from consilium.config.job import load_job
from consilium.federation.job_assembly import assemble_job
from consilium.server.coordinator import Coordinator
if {text}:
    import transformers
    def refuse(*args, **kwargs):
        raise AssertionError("a tokenizer was built")
    transformers.PreTrainedTokenizerBase.__init__ = refuse
privacy = {{"unit": "site", "clip": 1.0, "noise_multiplier": 1.0}}
for path in map(Path, {jobs!r}):
    Coordinator(assemble_job(load_job(path, {{"privacy": privacy}})), Path({folder!r}, path.name), print).close()
"""
WAITS = """
from typer.testing import CliRunner
from consilium.cli.main import app
from consilium.flare.job import simulator
called = []
def started(self, job, *rest):
    called.append(job)
    raise KeyboardInterrupt
simulator.Simulator.run = started
CliRunner().invoke(app, ["simulate", {job!r}, "--engine", "flare", "--workspace", {folder!r}])
assert called
"""


MODULES = "\nimport json, sys\nprint(json.dumps(list(sys.modules)))\n"


def done_by(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Return a fresh process that has run `code`."""
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | env, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done


def loaded(code: str) -> set[str]:
    """Return the names of all modules in a fresh process after `code`."""
    return set(json.loads(done_by(code + MODULES).stdout.splitlines()[-1]))


def server(folder: Path, *jobs: str) -> str:
    paths = [str(ROOT / "jobs" / job) for job in jobs]
    return SERVER.format(jobs=paths, folder=str(folder), text="quickstart_text" in jobs)


def test_light_commands_load_no_torch_nor_do_those_that_draw() -> None:
    """Nor does a command line that reads a job, which loads no numpy either."""
    done_by(READ.format(light=LIGHT, draws=DRAWS, heavy=["torch", *HEAVY]))


def test_lazy_functions_are_imported_when_they_are_called() -> None:
    found = lazy("fractions:Fraction", 1)
    assert str(found(3)) == "1/3"
    missing = lazy("consilium.no_such_module:build")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        missing()


@pytest.mark.slow
def test_a_server_of_cells_and_texts_builds_no_tokenizer_and_loads_little(tmp_path: Path) -> None:
    """Both models are of `transformers`, which loads tokenizers and torch's compiler."""
    allowed = {"transformers", "tokenizers", "torch._dynamo"}
    assert loaded(server(tmp_path, "quickstart_cells", "quickstart_text")) & (set(HEAVY) - allowed) == set()


@pytest.mark.slow
def test_who_waits_for_flares_simulator_has_no_torch(tmp_path: Path) -> None:
    found = loaded(WAITS.format(job=str(ROOT / "jobs/quickstart"), folder=str(tmp_path / "run")))
    assert found & {"torch", *HEAVY} == set()


ASKED = """
import json
import consilium.flare.job.executor
import huggingface_hub.constants as hub, transformers.integrations.hub_kernels as kernels
from transformers.utils.hub import is_offline_mode
print(json.dumps([hub.HF_HUB_OFFLINE, is_offline_mode(), not kernels._kernels_enabled,
                  hub.HF_HUB_DISABLE_TELEMETRY, hub.HF_HUB_DISABLE_IMPLICIT_TOKEN]))
"""
ONLINE = {
    "HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0", "HF_DATASETS_OFFLINE": "0", "USE_HUB_KERNELS": "YES",
    "HF_HUB_DISABLE_TELEMETRY": "0", "HF_HUB_DISABLE_IMPLICIT_TOKEN": "0", "DO_NOT_TRACK": "0",
}  # fmt: skip
SPINNING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """Run a server of pictures and print its modules; then load what sites load, and print the offline switches."""
    code = server(tmp_path_factory.mktemp("server"), "quickstart") + MODULES + ASKED
    with pytest.MonkeyPatch.context() as patch:
        for name in SPINNING:
            patch.delenv(name, raising=False)
        return done_by(code, **ONLINE, OMP_DISPLAY_ENV="VERBOSE")


def test_a_server_of_pictures_loads_nothing_of_the_sites(whole: subprocess.CompletedProcess[str]) -> None:
    found = set(json.loads(whole.stdout.splitlines()[-2]))
    assert {"consilium.server.coordinator", "nvflare", "torch"} <= found
    assert found & set(HEAVY) == set()


def test_libraries_of_a_site_stay_off_the_hub(whole: subprocess.CompletedProcess[str]) -> None:
    """Every module of ours imports the package first. bitsandbytes would fetch code where the hub's package is installed."""
    assert json.loads(whole.stdout.splitlines()[-1]) == [True] * 5


def test_a_process_that_we_start_inherits_the_offline_switches() -> None:
    """A child that loads none of our modules, as FLARE's processes do before they load the job's."""
    code = "import subprocess, sys, consilium; subprocess.run([sys.executable, '-c', %r], check=True)"
    child = f"import json, os; print(json.dumps({{name: os.environ[name] for name in {sorted(ONLINE)}}}))"
    found = json.loads(done_by(code % child, **ONLINE).stdout.splitlines()[-1])
    assert all(found[name] != value for name, value in ONLINE.items())


def test_threads_of_torch_hardly_spin(whole: subprocess.CompletedProcess[str]) -> None:
    """libgomp itself prints the value that it has read."""
    if "GOMP_SPINCOUNT" not in whole.stderr:
        pytest.skip("torch's threads are not libgomp's here")
    assert "GOMP_SPINCOUNT = '1000'" in whole.stderr


@pytest.mark.parametrize(("wish", "left"), [({"GOMP_SPINCOUNT": "77"}, "77"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None")])
def test_a_user_s_own_setting_of_spinning_threads_stays(
    wish: dict[str, str], left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in SPINNING:
        monkeypatch.delenv(name, raising=False)
    assert done_by("import consilium, os; print(os.environ.get('GOMP_SPINCOUNT'))", **wish).stdout.strip() == left


def test_what_the_recipes_import_is_there() -> None:
    text = (Path(__file__).parents[1] / "custom/recipes.md").read_text()
    found = re.findall(r"^from (consilium[\w.]*) import ([\w, ]+)$", text, re.MULTILINE)
    made = ("consilium.strategies.fedadam", "consilium.strategies.one_mix", "consilium.models.patches_network")  # by a recipe
    assert len(found) > 15
    for module, names in found:
        if module not in made:
            assert all(hasattr(importlib.import_module(module), name.strip()) for name in names.split(",")), (module, names)


def test_what_tests_and_benchmarks_name_is_there(request: pytest.FixtureRequest) -> None:
    """Some run rarely, so a name of ours that has gone would be noticed late: an import, or what is taken of a module."""
    missing: list[str] = []
    gc.disable()  # it takes most of the time that parsing does
    request.addfinalizer(gc.enable)
    for path in sorted((ROOT / "tests").rglob("*.py")):
        nodes, modules = list(ast.walk(ast.parse(path.read_text()))), {}
        for one in nodes:
            if not isinstance(one, ast.ImportFrom) or not (one.module or "").startswith(("consilium", "tests")):
                continue
            for name in one.names:
                found = _named(one.module, name.name)
                modules[name.asname or name.name] = found
                missing += [f"{path}: {one.module}.{name.name}"] * (found is None)
        names = [one for one in nodes if isinstance(one, ast.Name)]
        stored = {one.id for one in names if isinstance(one.ctx, ast.Store)}  # may not be the module in all of the file
        missing += [
            f"{path}: {one.value.id}.{one.attr}"
            for one in nodes
            if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name) and one.value.id not in stored
            if isinstance(module := modules.get(one.value.id), ModuleType) and not hasattr(module, one.attr)
        ]
    assert missing == []


def _named(module: str, name: str) -> object | None:
    """Return what `from module import name` gives; None if nothing, "?" if it needs a package that is not here."""
    try:
        parent = importlib.import_module(module)
        return getattr(parent, name) if hasattr(parent, name) else importlib.import_module(f"{module}.{name}")
    except ModuleNotFoundError as error:
        return None if (error.name or "").startswith(("consilium", "tests")) else "?"


def test_commands_draw_no_progress_bar_of_a_library_in_a_pipe() -> None:
    """tqdm's bar is also transformers' while it reads a GGUF file. A program that imports the package keeps its own bars."""
    bar = "from tqdm.auto import tqdm; print(sum(tqdm(range(3))))"
    command = "import sys; sys.argv = ['consilium', '--version']; from consilium.cli.main import main"
    env = {name: value for name, value in os.environ.items() if name != "TQDM_DISABLE"}
    for before, quiet in (
        (f"{command}\ntry: main()\nexcept SystemExit: pass\nprint('then')", True),
        ("import consilium; print('then')", False),
    ):
        done = subprocess.run([sys.executable, "-c", f"{before}\n{bar}"], env=env, capture_output=True, text=True, check=True)
        assert done.stdout.endswith("then\n3\n")
        assert (done.stderr == "") is quiet
