"""The recipes' files run: an algorithm, a model, a task and an adapter, each one file and one registration."""

import json
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from consilium.adapters import adapter_state
from consilium.cli.main import main
from consilium.config.code_digest import strategy_code_digest
from consilium.config.job import JobConfig, load_job
from consilium.config.privacy import HospitalPrivacyPolicy
from consilium.config.site import SiteConfig
from consilium.core.errors import ConfigError, RefusedError
from consilium.core.messages import Payload, Tensors
from consilium.core.schema import validate
from consilium.core.storage import load_state
from consilium.estimates.communication import compare
from consilium.federation.job_assembly import assemble_job, build_model
from consilium.models.clip.network import ClipClassifier
from consilium.report.live_view import progress
from consilium.runtime.engine import simulate
from consilium.server.checks import check_update
from consilium.strategies.strategy import ServerState
from tests.conftest import Snapshot, small_cells, training_only
from tests.pages.reading import blocks
from tests.recipes.conftest import Install
from tests.recipes.fedadam import FedAdam
from tests.strategies.scripted import Scripted

SITES = {"site-1": SiteConfig(), "site-2": SiteConfig()}
Toy = tuple[dict[str, Any], dict[str, SiteConfig]]
EVERYONE = None
"""The packages whose kinds a researcher's own machine knows: all."""


def job_of(changes: Mapping[str, Any]) -> JobConfig:
    """Return the small classification job with other sections, as a job.yaml would have them."""
    raw = small_cells(rounds=2, lr=2e-2, batch_size=8, local_epochs=2).model_dump(mode="json") | dict(changes)
    return validate(JobConfig, raw, Path("job.yaml"), EVERYONE)


def run(config: JobConfig, folder: Path, sites: Mapping[str, SiteConfig] = SITES, **how: Any) -> dict[str, dict[str, float]]:
    """Return the closing metrics by site of a run in one process."""
    simulate(assemble_job(config), dict(sites), folder, how.pop("observer", lambda event: None), **how)
    return json.loads((folder / "results.json").read_text())


def command(*words: str) -> None:
    """Run `consilium` in this process, which knows the packages of the test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["consilium", *words])
        with pytest.raises(SystemExit) as end:
            main()
    assert end.value.code == 0


def mean(results: Mapping[str, Mapping[str, float]], metric: str) -> float:
    return sum(metrics[metric] for metrics in results.values()) / len(results)


def server(workspace: Path) -> Tensors:
    return load_state(workspace / "server/state.safetensors")[0]


def pictures(folder: Path, label: Callable[[float], Any] = float) -> SiteConfig:
    """Write grey pictures, each with what `label` says of its brightness (0 to 1), and return their site."""
    folder.mkdir(parents=True)
    rng, lists = np.random.default_rng(len(folder.name)), dict[str, list[dict[str, Any]]]()
    for split, count in {"training": 24, "validation": 4, "test": 12}.items():
        lists[split] = []
        for index, level in enumerate(rng.uniform(0.1, 0.9, count)):
            pixels = np.clip(255 * level + rng.normal(0, 8, (64, 64, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"{split}-{index}.png")
            lists[split].append({"image": f"{split}-{index}.png", "label": label(level)})
    (folder / "datalist.json").write_text(json.dumps(lists))
    return SiteConfig(datalist=folder / "datalist.json")


@pytest.fixture
def toy(install: Install, tmp_path: Path) -> Toy:
    """Return the sections of a job on the toy model, and two sites with dark and bright pictures."""
    install("toy_model.py", "models", "toy", "TOY")
    sites = {name: pictures(tmp_path / name, lambda level: "bright" if level > 0.5 else "dark") for name in SITES}
    sections = {"model": {"name": "toy"}, "adapter": {"rank": 2, "targets": "mix"}, "data": {}}
    return sections | {"task": {"name": "classification", "classes": ["dark", "bright"], "augment": False}}, sites


# an algorithm ---------------------------------------------------------------------------------------------------------


def test_fedadam_moves_by_hand_worked_steps() -> None:
    """Mean updates 0.5 and -0.25; lr 1, beta_1 = beta_2 = 0.5, tau = 1.

    m = 0.25, v = 0.5 + 0.125 = 0.625, x = 0.25 / (sqrt 0.625 + 1); then m = 0.125 - 0.125 = 0, so x stays, and
    v = 0.3125 + 0.03125 = 0.34375.
    """
    strategy = FedAdam(lr=1.0, beta1=0.5, beta2=0.5, tau=1.0)
    state = ServerState(0, 0, {"x": torch.zeros(1)}, {})
    state = strategy.aggregate(state, {"x": torch.tensor([0.5], dtype=torch.float64)})
    first = 0.25 / (math.sqrt(0.625) + 1)
    assert state.shared["x"].item() == pytest.approx(first, rel=1e-6)
    assert {n: t.item() for n, t in state.optimizer.items()} == {"m/x": 0.25, "v/x": 0.625}
    state = strategy.aggregate(state, {"x": torch.tensor([-0.25], dtype=torch.float64)})
    assert state.shared["x"].item() == pytest.approx(first, rel=1e-6)
    assert {n: t.item() for n, t in state.optimizer.items()} == {"m/x": 0.0, "v/x": 0.34375}
    assert state.round == 2


def test_fedadam_learns_and_a_broken_run_goes_on_with_its_moments(install: Install, toy: Toy, tmp_path: Path) -> None:
    install("fedadam.py", "strategies", "fedadam", "FedAdam")
    sections, sites = toy
    config = job_of(sections | {"strategy": {"name": "fedadam", "lr": 0.2}})
    snapshot = Snapshot(tmp_path / "run", lambda event: event["event"] == "step" and event["round"] == 1)
    results = run(config, tmp_path / "run", sites, observer=snapshot)
    assert mean(results, "test/global/loss") < 0.95 * mean(results, "test/pretrained/loss")
    finished, events = snapshot.restore(), list[Mapping[str, Any]]()
    assert run(config, tmp_path / "run", sites, observer=events.append, resume=True) == results
    assert {event["round"] for event in events if event["event"] == "step"} == {1}
    whole, broken = server(finished), server(tmp_path / "run")
    assert whole["optimizer/m/head.weight"].any()
    assert whole.keys() == broken.keys()
    assert all(torch.equal(whole[name], broken[name]) for name in whole)
    assert (finished / "adapters/global/adapter_model.safetensors").is_file()
    versions = json.loads((finished / "versions.json").read_text())
    assert (versions["recipe_fedadam"], versions["code"]) == ("1.0", strategy_code_digest(config))


# a model --------------------------------------------------------------------------------------------------------------


def test_a_model_of_ones_own_learns(toy: Toy, tmp_path: Path) -> None:
    sections, sites = toy
    config = job_of(sections)
    results = run(config, tmp_path / "run", sites)
    assert mean(results, "test/global/loss") < 0.9 * mean(results, "test/pretrained/loss")
    assert mean(results, "test/pretrained/loss") == pytest.approx(math.log(2))  # a zero head: both classes equally likely
    exported = load_file(tmp_path / "run/sites/site-1/adapters/global/adapter_model.safetensors")
    assert {tuple(t.shape) for t in exported.values()} == {(2, 16), (16, 2), (2, 16), (2,)}
    assert len(compare(assemble_job(config))) > 5


def test_a_models_target_sets_are_named_where_none_fits(install: Install) -> None:
    install("toy_model.py", "models", "toy", "TOY")
    with pytest.raises(ConfigError, match="'paper' matches no linear layer of the model; use mix, or a full regex"):
        assemble_job(job_of({"model": {"name": "toy"}}))


def test_phantoms_need_to_know_how_large_a_models_pictures_are(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("toy_model.py", "models", "toy", "TOY")
    assert job_of({"model": {"name": "toy"}}).model.image_side == 32
    monkeypatch.setattr("recipe_toy_model.ToyConfig.image_side", property(lambda config: 0))
    with pytest.raises(ConfigError, match="'cells' are pictures, and the model's config says no image_side; add it there"):
        job_of({"model": {"name": "toy"}})


# a task ---------------------------------------------------------------------------------------------------------------


def test_a_task_of_ones_own_learns_on_a_model_of_the_package(install: Install, tmp_path: Path) -> None:
    install("regression.py", "tasks", "regression", "REGRESSION")
    sites = {name: pictures(tmp_path / name) for name in SITES}
    config = job_of({"task": {"name": "regression"}, "data": {}})
    results = run(config, tmp_path / "run", sites)
    scored = [*(("test", stage) for stage in ("pretrained", "global", "personalized")), ("validation", "global")]
    scored.append(("validation", "personalized"))
    assert results["site-1"].keys() == {f"{split}/{stage}/{name}" for split, stage in scored for name in ("loss", "mae")}
    assert mean(results, "test/global/mae") < 0.7 * mean(results, "test/pretrained/mae")
    for name, site in sites.items():  # a zero head says 0
        labels = [one["label"] for one in json.loads(Path(str(site.datalist)).read_text())["test"]]
        assert results[name]["test/pretrained/mae"] == pytest.approx(sum(labels) / len(labels), rel=1e-5)
    assert (tmp_path / "run/adapters/global/adapter_model.safetensors").is_file()


def test_a_task_says_which_models_do_it(install: Install) -> None:
    install("regression.py", "tasks", "regression", "REGRESSION")
    with pytest.raises(ConfigError, match=r"task\.name: 'regression' does not fit model.name 'sam'"):
        job_of({"task": {"name": "regression"}, "data": {}, "model": {"name": "sam", "variant": "tiny", "image_size": 64}})
    with pytest.raises(ConfigError, match=r"data\.phantoms\.kind: 'cells' does not fit task.name 'regression'"):
        job_of({"task": {"name": "regression"}})


def test_the_command_line_shows_its_scores(install: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install("regression.py", "tasks", "regression", "REGRESSION")
    for name in SITES:
        pictures(tmp_path / "data" / name)
    job = tmp_path / "job.yaml"
    job.write_text(
        "name: brightness\nstrategy: {name: fedit}\nmodel: {name: clip, variant: tiny, image_size: 64}\n"
        "task: {name: regression}\ntraining: {rounds: 1, local_steps: 2}\n"
    )
    command("simulate", str(job), "--data", str(tmp_path / "data"), "--workspace", str(tmp_path / "run"))
    said = capsys.readouterr().out
    assert "Mean abs. error" in said
    assert "round 1/1  site-2: loss" in said
    found = progress(tmp_path / "run")
    assert found["scores"]["leading"] == ["mae"]
    (tmp_path / "kit/local").mkdir(parents=True)
    (tmp_path / "kit/local/site.yaml").write_text("plugins: [recipe-regression]\n")
    listed = str(tmp_path / "data/site-1/datalist.json")
    with pytest.raises(AssertionError):  # at a hospital no package is looked at that its site.yaml does not list
        command("data", "check", listed, "--job", str(job))
    capsys.readouterr()
    command("data", "check", listed, "--job", str(job), "--kit", str(tmp_path / "kit"))
    said = capsys.readouterr().out
    assert "24 training, 4 validation, 12 test" in said
    assert "only the list was read" in said


def test_the_figures_of_a_task_that_is_not_installed_here_are_its_loss(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("name: other\ntask: {name: elsewhere}\ntraining: {rounds: 1}\n")
    (tmp_path / "metrics.jsonl").write_text("")
    assert progress(tmp_path)["scores"] == {"leading": ["loss"], "headings": {}, "grid": ""}


# an adapter -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_adapter_of_ones_own_learns_and_switched_off_it_is_the_base(install: Install, tmp_path: Path) -> None:
    install("shift.py", "adapters", "shift", "SHIFT")
    task = small_cells().task.model_dump() | {"augment": False}
    config = job_of({"adapter": {"kind": "shift", "targets": "all-linear"}, "task": task})
    results = run(config, tmp_path / "run")
    assert mean(results, "test/global/loss") < 0.97 * mean(results, "test/pretrained/loss")
    values = load_file(tmp_path / "run/adapters/global/adapter.safetensors")
    model, base = (build_model(job, SiteConfig()) for job in (config, small_cells()))
    assert isinstance(model, ClipClassifier)
    assert isinstance(base, ClipClassifier)
    images = 255 * torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    adapter_state.load(model, values)
    with torch.no_grad(), adapter_state.disable_adapter(base):
        features = base.features(images)
    with torch.no_grad():
        assert not torch.allclose(model.features(images), features)
        with adapter_state.disable_adapter(model):
            assert torch.equal(model.features(images), features)
        assert not torch.allclose(model.features(images), features)


def test_a_huge_update_of_an_adapter_that_starts_at_zero_is_refused(install: Install) -> None:
    install("shift.py", "adapters", "shift", "SHIFT")
    job = assemble_job(job_of({"adapter": {"kind": "shift"}}))
    assert not any(tensor.any() for tensor in job.initial.values())
    update = {name: torch.zeros_like(tensor) for name, tensor in job.initial.items()}
    for norm, fits in ((99.0, True), (101.0, False)):  # federation.max_norm_ratio is 100
        update["head.bias"] = torch.tensor([norm, 0, 0, 0, 0])
        with nullcontext() if fits else pytest.raises(RefusedError, match="update has norm 101"):
            check_update(job, None, Payload(0, 0, update), Payload(0, 0, job.initial))


@pytest.mark.parametrize("strategy", ["ffa_lora", "deer", "fedsca"])
def test_an_algorithm_for_other_adapters_says_what_to_use(strategy: str, install: Install) -> None:
    install("shift.py", "adapters", "shift", "SHIFT")
    with pytest.raises(ConfigError, match=r"strategy \w+ cannot place adapter tensor '.*'; use adapter kind (lora|bottleneck)"):
        assemble_job(job_of({"adapter": {"kind": "shift"}, "strategy": {"name": strategy}}))


def test_an_adapter_of_ones_own_trains_under_record_level_dp(install: Install, tmp_path: Path) -> None:
    install("shift.py", "adapters", "shift", "SHIFT")
    privacy = {"unit": "record", "clip": 1.0, "noise_multiplier": 1.0}
    raw = training_only(small_cells(rounds=1, lr=1e-2, batch_size=8, local_steps=1)).model_dump(mode="json")
    config = job_of({"adapter": {"kind": "shift"}, "privacy": privacy, "training": raw["training"], "data": raw["data"]})
    job, site = assemble_job(config), SiteConfig(privacy=HospitalPrivacyPolicy(noise_seed=1))
    shared = simulate(job, {"site-1": site, "site-2": site}, tmp_path, lambda event: None).state.shared
    assert all(not torch.equal(tensor, job.initial[name]) for name, tensor in shared.items())


# all together ---------------------------------------------------------------------------------------------------------


def test_all_four_stand_in_one_job_file(install: Install, tmp_path: Path) -> None:
    for file, group, name, attribute in (
        ("fedadam.py", "strategies", "fedadam", "FedAdam"),
        ("toy_model.py", "models", "toy", "TOY"),
        ("shift.py", "adapters", "shift", "SHIFT"),
    ):
        install(file, group, name, attribute)
    path = tmp_path / "job.yaml"
    path.write_text(
        "name: own\nstrategy: {name: fedadam}\nmodel: {name: toy}\nadapter: {kind: shift, targets: mix}\n"
        "task: {name: classification, classes: [a, b]}\ntraining: {rounds: 1}\n"
    )
    config = load_job(path, plugins=EVERYONE)
    assert config.packages == {"recipe_fedadam": "1.0", "recipe_toy_model": "1.0", "recipe_shift": "1.0"}
    with pytest.raises(ConfigError) as refused:
        load_job(path)
    lines = str(refused.value).split("\n")
    assert [line.split(": ")[1] for line in lines] == ["strategy.name", "model.name", "adapter.kind"]
    assert "'fedadam'" in lines[0]


def test_one_mix_learns_its_weight_by_hand() -> None:
    """Own 0, global 2, loss (x - 1)^2 / 2: the gradient at 0 + w 2 is 2 w - 1, times the gap 2, times eta 1/8.

    From w = 1: 1 - 1/8 * 1 * 2 = 3/4; then 3/4 - 1/8 * 1/2 * 2 = 5/8. The site starts at 5/4.
    """
    module: dict[str, Any] = {"__name__": "one_mix"}
    (block,) = [one for one in blocks("custom/recipes.md") if one.home and one.home[0].endswith("one_mix.py")]
    exec(compile(block.text, "one_mix.py", "exec"), module)
    strategy, start = module["OneMix"](eta=0.125), {"x": torch.tensor([2.0])}

    class Bowl:
        batches = 2

        def __call__(self, values: Tensors, names: Any) -> tuple[float, Tensors]:
            return 0.0, {"x": values["x"] - 1}

    trainer = Scripted(strategy, start, {}, Payload(0, 0, start), {"x": torch.zeros(1)}, Bowl())
    update = strategy.local_update(trainer, Payload(0, 0, start))
    assert trainer.memory["weight"].item() == 0.625
    assert update.tensors["x"].item() == 1.25 - 2
