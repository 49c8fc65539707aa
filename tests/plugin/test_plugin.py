"""A package of somebody else's: used where it is allowed, unknown and unread where it is not, the same at server and sites."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from consilium import __version__
from consilium.config.job import JobConfig, load_job
from consilium.config.site import SiteConfig
from consilium.core.errors import ConfigError, RefusedError
from consilium.core.messages import Hello, Tensors
from consilium.core.storage import load_state
from consilium.federation.job_assembly import assemble_job
from consilium.flare.job.recipe import export_simulation_job
from consilium.flare.job.simulator import Simulator
from consilium.report.run_record import read_run
from consilium.runtime.engine import simulate
from consilium.server.coordinator import Coordinator
from consilium.strategies.fedit import FedIT
from consilium.strategies.registry import STRATEGIES
from consilium.use.model import open_model
from tests.conftest import Snapshot, run, small_config
from tests.recipes.conftest import write_distribution

EXAMPLE, ROOT = Path(__file__).parent / "example", Path(__file__).parents[2]
NAME, MODULE = "consilium-fedavgm", "consilium_fedavgm"
SITES = {"site-1": SiteConfig(), "site-2": SiteConfig()}


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder into which pip has installed the example; nothing is downloaded for it."""
    place = tmp_path_factory.mktemp("plugin")
    source = shutil.copytree(EXAMPLE, place / "source")  # setuptools builds in the source's own folder
    how = ["--no-index", "--no-deps", "--no-build-isolation", "--quiet", "--target", str(place / "installed")]
    subprocess.run([sys.executable, "-m", "pip", "install", *how, str(source)], check=True)
    return place / "installed"


@pytest.fixture
def installed(packages: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(packages)
    return packages


def job_file(folder: Path, strategy: str = "fedavgm", rounds: int = 2) -> Path:
    """Write the small job with a strategy of any name."""
    raw = small_config("fedit", rounds=rounds, local_steps=1).model_dump(mode="json")
    raw["data"]["phantoms"] |= {"training": 2, "validation": 0, "test": 0}  # tensors are what counts here
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(raw | {"strategy": {"name": strategy}}))
    return path


def job_of(folder: Path, strategy: str = "fedavgm", rounds: int = 2) -> JobConfig:
    return load_job(job_file(folder, strategy, rounds), plugins=None)


def server(workspace: Path, group: str) -> Tensors:
    tensors = load_state(workspace / "server/state.safetensors")[0]
    return {name.removeprefix(f"{group}/"): t for name, t in tensors.items() if name.startswith(f"{group}/")}


def test_the_pages_pyproject_needs_this_distribution_and_names_its_packages() -> None:
    """PyPI's `consilium` is another project: a package that asked for it would bring a stranger's code."""
    (block,) = re.findall(
        r"```toml\n(# pyproject.toml of your package.*?)```", (ROOT / "custom/recipes.md").read_text(), re.DOTALL
    )
    page, ours = tomllib.loads(block), tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert page["project"]["dependencies"] == [ours["project"]["name"]]
    (attribute,) = page["project"]["entry-points"]["consilium.strategies"].values()
    assert page["tool"]["setuptools"]["packages"] == [attribute.partition(".")[0]]


# where it may be used -------------------------------------------------------------------------------------------------


def test_its_first_round_is_fedavg_and_its_second_goes_further(installed: Path, tmp_path: Path) -> None:
    one_round = Snapshot(tmp_path / "fedavgm", lambda event: event["event"] == "round" and event["round"] == 1)
    for name, rounds in (("fedit", 1), ("fedavgm", 2)):
        simulate(assemble_job(job_of(tmp_path, name, rounds)), SITES, tmp_path / name, one_round)
    plain, one = server(tmp_path / "fedit", "shared"), server(one_round.kept, "shared")
    assert plain.keys() == one.keys()
    assert all(torch.equal(plain[name], one[name]) for name in plain)
    two, first, second = (
        server(tmp_path / "fedavgm", "shared"),
        *(server(folder, "optimizer") for folder in (one_round.kept, tmp_path / "fedavgm")),
    )
    assert first.keys() == plain.keys()
    assert all(torch.equal(two[n], (one[n].double() + second[n]).float()) for n in two)
    assert any(not torch.equal(first[n], second[n]) for n in first)


def test_two_updates_of_one_half_move_by_hand_worked_steps(installed: Path, tmp_path: Path) -> None:
    """Momentum 0.9, both means 0.5: v = 0.5, then 0.45 + 0.5 = 0.95, so x = 0.5, then 1.45."""
    strategy = job_of(tmp_path).strategy
    state = strategy.initialize({"x": torch.zeros(1, dtype=torch.float64)})
    moved = []
    for _ in range(2):
        state = strategy.aggregate(state, {"x": torch.tensor([0.5], dtype=torch.float64)})
        moved.append(state.shared["x"].item())
    assert moved == pytest.approx([0.5, 1.45], rel=1e-15)


def test_a_site_of_a_simulation_that_lists_other_packages_refuses(installed: Path, tmp_path: Path) -> None:
    job = assemble_job(job_of(tmp_path))
    with pytest.raises(RefusedError, match="site-2: package 'consilium-fedavgm' is not among `plugins`"):
        simulate(job, SITES | {"site-2": SiteConfig(plugins=())}, tmp_path / "run", lambda event: None)
    listed = SiteConfig(plugins=("Consilium_FedAvgM",))  # as pip compares names
    simulate(job, SITES | {"site-2": listed}, tmp_path / "again", lambda event: None)
    assert (tmp_path / "again/results.json").is_file()


def test_the_server_takes_sites_with_its_own_version_of_the_package_only(installed: Path, tmp_path: Path) -> None:
    job = assemble_job(job_of(tmp_path))
    coordinator = Coordinator(job, tmp_path / "run", lambda event: None)
    hello = Hello("site-1", 8, False, __version__, plugins={NAME: "0.1.0"})
    coordinator.welcome(hello)
    for other in ({NAME: "0.2.0"}, {}, {NAME: "0.1.0", "another": "1.0"}):
        with pytest.raises(RefusedError, match=r"others than the server's \(consilium-fedavgm 0\.1\.0\); install the same"):
            coordinator.welcome(replace(hello, name="site-2", plugins=other))
    coordinator.close()
    assert coordinator.sites.keys() == {"site-1"}


@pytest.mark.slow
def test_flares_processes_use_it_too(packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(packages)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (packages, ROOT / "custom", ROOT))))
    config = job_of(tmp_path, rounds=1)
    simulate(assemble_job(config), SITES, tmp_path / "inprocess", lambda event: None)
    events: list[str] = []
    with Simulator(list(SITES)) as simulator:
        simulator.run(
            export_simulation_job(config, tmp_path / "flare"), tmp_path / "flare", lambda e: events.append(e["event"])
        )
    assert "refused" not in events
    for group in ("shared", "optimizer"):
        ours, theirs = server(tmp_path / "inprocess", group), server(tmp_path / "flare", group)
        assert ours.keys() == theirs.keys() != set()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


# at a hospital --------------------------------------------------------------------------------------------------------

APPROVE = """
import contextlib, io, json, sys
from consilium.cli.main import main
job, *kits = sys.argv[1:]
found = []
for kit in kits:
    said, sys.argv = io.StringIO(), ["consilium", "approve", job, "--kit", kit, "--yes"]
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            main()
        except SystemExit as end:
            code = end.code
    found.append([{"code": code, "imported": %r in sys.modules}, said.getvalue()])
print(json.dumps(found))
"""


def test_a_package_that_is_not_listed_is_not_even_imported(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    with pytest.raises(ConfigError, match=r"strategy\.name: 'fedavgm': expected one of fedit.*under `plugins` of site\.yaml"):
        load_job(job_file(tmp_path))
    assert MODULE not in sys.modules


@pytest.mark.slow  # a process of seconds; the one above shows the border in this one
def test_a_hospital_takes_a_package_it_lists_and_reads_nothing_of_another(packages: Path, tmp_path: Path) -> None:
    """`consilium approve` at a kit that does not list the package, then at one that does."""
    kits = [tmp_path / name for name in ("without", "with")]
    for kit, site in zip(kits, ("{approve: digest}", f"{{approve: digest, plugins: [{NAME}]}}"), strict=True):
        (kit / "local").mkdir(parents=True)
        (kit / "local/site.yaml").write_text(site)
    path = os.pathsep.join(map(str, (packages, ROOT / "custom")))
    command = [sys.executable, "-c", APPROVE % MODULE, job_file(tmp_path), *kits]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}, check=True)
    (refused, why), (taken, said) = json.loads(done.stdout)
    assert refused == {"code": 2, "imported": False}
    assert "strategy.name: 'fedavgm': expected one of fedit" in why
    assert "under `plugins` of site.yaml" in why
    assert len(why.strip().splitlines()) == 1
    assert taken == {"code": 0, "imported": True}
    assert f"plug-in {NAME} 0.1.0" in said


# what a package cannot do ---------------------------------------------------------------------------------------------

TWIN = "from consilium.strategies.fedit import FedIT\n\n\nclass Own(FedIT):\n    name = %r\n"


def add(folder: Path, package: str, code: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_distribution(folder / "packages", package, code, "strategies", name, "Own")
    monkeypatch.syspath_prepend(folder / "packages")


def test_a_package_cannot_take_a_name_of_ours_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    add(tmp_path, "plugin_thief", TWIN % "fedit", "fedit", monkeypatch)
    for plugins in (frozenset(), frozenset({"plugin-other"})):
        assert load_job(job_file(tmp_path, "fedit"), plugins=plugins).packages == {}
    assert caplog.messages == []
    config = job_of(tmp_path, "fedit")
    assert type(config.strategy) is FedIT
    assert config.packages == {}
    assert "plugin_thief" not in sys.modules
    assert STRATEGIES.known_names(None).count("fedit") == 1
    job_of(tmp_path, "fedit")
    said = "strategy 'fedit': the built-in one is used, not that of package plugin_thief; rename that one"
    assert caplog.messages == [said]  # once per process


def test_two_packages_with_one_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("plugin_one", "plugin_two"):
        add(tmp_path, package, TWIN % "twice", "twice", monkeypatch)
    with pytest.raises(
        ConfigError, match="strategy 'twice' comes with two packages, plugin_one and plugin_two; list or"
    ) as one:
        job_of(tmp_path, "twice")
    assert "\n" not in str(one.value)
    assert load_job(job_file(tmp_path, "twice"), plugins=frozenset({"plugin-two"})).packages == {"plugin_two": "1.0"}
    with pytest.raises(ConfigError, match="this process runs that of package plugin_two already"):  # never one for the other
        load_job(job_file(tmp_path, "twice"), plugins=frozenset({"plugin-one"}))


@pytest.mark.parametrize(
    ("package", "code", "why"),
    [
        ("plugin_broken", "raise OSError('no\\nlicence')", "cannot be loaded (OSError: no licence)"),
        ("plugin_empty", "", "cannot be loaded (AttributeError"),
        ("plugin_number", "Own = 7", "cannot be loaded (TypeError: it names a int, and what is wanted is a Strategy)"),
        (
            "plugin_plain",
            "class Own: pass",
            "entry point 'plugin_plain:Own': cannot be loaded (TypeError: it names the class Own",
        ),
        (
            "plugin_bare",
            "from consilium.strategies.fedit import FedIT\n\nclass Own(FedIT):\n    name = 'plugin_bare'\n    eta: float = 1.0",
            "class Own is no dataclass; write @dataclass(frozen=True) above it",
        ),
        ("plugin_alias", TWIN % "other", "its class has the name 'other'; write 'plugin_alias' there"),
    ],
)
def test_a_package_that_does_not_fit_is_one_line(
    package: str, code: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(tmp_path, package, code, package, monkeypatch)
    with pytest.raises(ConfigError) as refused:
        job_of(tmp_path, package)
    assert why in str(refused.value)
    assert f"strategy '{package}'" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_run_names_the_package_that_is_missing_here(
    packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as there:
        there.syspath_prepend(packages)
        simulate(assemble_job(job_of(tmp_path)), SITES, tmp_path / "run", lambda event: None)
    monkeypatch.setattr(STRATEGIES, "_added", {})
    places = [tmp_path / "run", tmp_path / "run/adapters/global", tmp_path / "run/sites/site-1/adapters/global"]
    for place in places:
        with pytest.raises(ConfigError, match=rf"{NAME} 0\.1.*not installed here; install it"):
            open_model(place)
    with pytest.raises(ConfigError, match=rf"{NAME} 0\.1.*not installed here; install it"):
        read_run(places[0])
    (tmp_path / "new").mkdir()
    capsys.readouterr()
    assert run(monkeypatch, "predict", places[0], tmp_path / "new", "-o", tmp_path / "masks") == 2
    said = capsys.readouterr().err
    assert re.search(rf"{NAME} 0\.1.*not installed here; install it", " ".join(said.split()))
    assert "Traceback" not in said
    monkeypatch.syspath_prepend(packages)  # as an installation does
    assert open_model(places[0]).config.strategy.name == "fedavgm"
