"""A submitter names any function or class that this package has or imports, in every form that FLARE's configuration knows."""

import importlib
import importlib.util
import json
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from nvflare.fuel.utils.class_utils import instantiate_class

import consilium
from consilium.core.errors import ConfigError
from consilium.flare.kit.kit_hardening import ALLOW_LIST, CLASSES
from consilium.flare.kit.local_folder import update_local
from tests.adversary.submitter.building import ROLES, Builder, make_kits

EMPTY = {"format_version": 2}
POPEN = {"path": "subprocess.Popen", "args": {"args": ["true"]}}
FORMS: dict[str, Callable[[str, str], dict[str, Any]]] = {
    "path": lambda name, own: {"id": "x", "path": name},
    "class_path": lambda name, own: {"id": "x", "class_path": name},
    "both": lambda name, own: {"id": "x", "class_path": own, "path": name},
    "as dict": lambda name, own: {"id": "x", "path": name, "config_type": "dict"},
    "argument": lambda name, own: {"id": "x", "path": own, "args": {"a": {"path": name}}},
    "argument by class_path": lambda name, own: {"id": "x", "path": own, "args": {"a": {"class_path": name}}},
    "in a list": lambda name, own: {"id": "x", "path": own, "args": {"a": [{"b": [{"path": name}]}]}},
    "deep": lambda name, own: {"id": "x", "path": own, "args": {"a": {"b": {"c": {"path": name}}}}},
    "components in an argument": lambda name, own: {
        "id": "x",
        "path": own,
        "args": {"components": [{"id": "y", "path": name, "config_type": "dict"}]},
    },
}
"""Ways to name a component `name`, beside or inside one of the role's `own`."""


def every_name() -> list[str]:
    """Return all that can be imported under consilium: modules, what they define, what they import, and members of classes."""
    found = {consilium.__name__}
    for module in pkgutil.walk_packages(consilium.__path__, f"{consilium.__name__}."):
        found.add(module.name)
        if module.name == "consilium.models.quantized" and importlib.util.find_spec("bitsandbytes") is None:
            continue
        for name, value in vars(importlib.import_module(module.name)).items():
            found.add(f"{module.name}.{name}")
            if isinstance(value, type) and value.__module__ == module.name:
                found |= {f"{module.name}.{name}.{member}" for member in vars(value)}
    return sorted(found)


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_kits(tmp_path_factory.mktemp("kits"))


@pytest.fixture(scope="module")
def names() -> list[str]:
    found = every_name()
    assert {
        "consilium.flare.kit.provision.prepare_builders",
        "consilium.cli.main.app",
        "consilium.models.weight_files.save_file",
    } <= {*found}
    assert len(found) > 3000
    return found


@pytest.mark.parametrize("role", ROLES)
def test_of_all_names_only_the_roles_classes_are_ever_called(
    role: str, kits: dict[str, Path], names: list[str], tmp_path: Path
) -> None:
    builder = Builder(kits[role], role, EMPTY, tmp_path)
    for name in names:
        builder.build({"id": "x", "path": name})
    assert sorted(builder.called) == sorted(CLASSES[role])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("step", [50, pytest.param(1, marks=pytest.mark.slow)])
def test_no_form_hides_a_name(step: int, role: str, form: str, kits: dict[str, Path], names: list[str], tmp_path: Path) -> None:
    own = CLASSES[role][0]
    builder = Builder(kits[role], role, EMPTY, tmp_path)
    worst = ["subprocess.Popen", "os.system", "builtins.eval", "consilium.flare.kit.provision.prepare_builders"]
    for name in [*names[::step], *worst]:
        builder.build(FORMS[form](name, own))
    assert {*builder.called} <= {*CLASSES[role]}


@pytest.mark.parametrize(
    "config",
    [
        {"words": "subprocess.Popen", "components": [{"id": "x", "path": "{words}"}]},
        {"a": "subprocess", "b": "Popen", "components": [{"id": "x", "path": "{a}.{b}"}]},
        {"@part": {"id": "x", "path": "subprocess.Popen"}, "components": ["{@part}"]},
        {
            "@part": {"id": "x", "path": "subprocess.Popen"},
            "components": [{"id": "y", "path": "OWN", "args": {"a": "{@part}"}}],
        },
        {"executors": [{"tasks": ["t"], "executor": POPEN}], "workflows": [POPEN]},
        {"task_data_filters": [{"tasks": ["t"], "filters": [POPEN]}]},
        {"task_result_filters": [{"tasks": ["t"], "filters": [POPEN]}]},
        {"handlers": [POPEN], "server": {"components": [POPEN]}, "snapshot_persistor": POPEN},
    ],
    ids=str,
)
@pytest.mark.parametrize("role", ROLES)
def test_no_place_in_a_jobs_configuration_builds_another_name(
    role: str, config: dict[str, Any], kits: dict[str, Path], tmp_path: Path
) -> None:
    """Names put together from variables, which FLARE fills in before it looks at them, are not a way round either."""
    own = json.loads(json.dumps(EMPTY | config).replace("OWN", CLASSES[role][0]))
    good = {"components": [{"id": "good", "path": CLASSES[role][0]}]}
    heard = [Builder(kits[role], role, values, tmp_path) for values in (own, EMPTY | good)]
    for one in heard:
        one.configure()
    assert {*heard[0].called} <= {CLASSES[role][0]}
    assert heard[1].called == [CLASSES[role][0]]  # what is allowed is built in this way


@pytest.mark.parametrize("name", ["FedAvg", "RoundController", "SiteExecutor", "ScatterAndGather"])
@pytest.mark.parametrize("role", ROLES)
def test_no_short_name_is_looked_up(role: str, name: str, kits: dict[str, Path], tmp_path: Path) -> None:
    builder = Builder(kits[role], role, EMPTY, tmp_path)
    assert not builder.build({"id": "x", "name": name})
    builder.build({"id": "x", "path": CLASSES[role][0], "args": {"a": {"name": name}}})
    assert {*builder.called} <= {CLASSES[role][0]}  # to which the map is an argument that it does not know


@pytest.mark.parametrize(
    "name", ["nvflare.app_common.workflows.fedavg.FedAvg", "nvflare.app_common.np.np_trainer.NPTrainer", "builtins.print"]
)
@pytest.mark.parametrize("role", ROLES)
def test_what_is_flares_or_pythons_is_not_on_a_kits_list(role: str, name: str, kits: dict[str, Path], tmp_path: Path) -> None:
    assert not Builder(kits[role], role, EMPTY, tmp_path).build({"id": "x", "path": name})


def test_one_roles_classes_are_not_built_at_the_other(kits: dict[str, Path], tmp_path: Path) -> None:
    for role, other in (ROLES, ROLES[::-1]):
        builder = Builder(kits[role], role, EMPTY, tmp_path)
        assert not any(builder.build({"id": "x", "path": path}) for path in CLASSES[other])


def test_an_old_kits_prefix_is_gone_after_allow(tmp_path: Path) -> None:
    for role, kit in make_kits(tmp_path).items():
        file = kit / "local/resources.json"
        old = ["consilium.", "consilium.flare.kit.provision", "consilium", "nvflare.app_common.workflows.fedavg.FedAvg"]
        file.write_text(json.dumps(json.loads(file.read_text()) | {ALLOW_LIST: old}))
        update_local(kit)
        assert json.loads(file.read_text())[ALLOW_LIST] == [old[-1], *CLASSES[role]]
        builder = Builder(kit, role, EMPTY, tmp_path)
        assert not builder.build({"id": "x", "path": "consilium.flare.kit.provision.prepare_builders"})


@pytest.mark.parametrize("path", [path for paths in CLASSES.values() for path in paths])
def test_no_class_takes_an_argument_that_it_does_not_know(path: str) -> None:
    """What FLARE hands over unbuilt, a map with config_type dict, is an argument like any other."""
    instantiate_class(path, {})
    for value in ("x", {"config_type": "dict", **POPEN}, [POPEN]):
        with pytest.raises(ValueError, match="unexpected keyword argument 'builders'"):
            instantiate_class(path, {"builders": value})


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"resume": {"config_type": "dict", **POPEN}}, "resume"),
        ({"resume": "subprocess.Popen"}, "resume"),
        ({"resume": "false"}, "resume"),
        ({"resume": 1}, "resume"),
        ({"resume": [POPEN]}, "resume"),
    ],
)
def test_the_controllers_argument_is_of_its_type(arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=rf"^config_fed_server\.json: RoundController: {field}: ") as told:
        instantiate_class("consilium.flare.job.controller.RoundController", arguments)
    assert "\n" not in str(told.value)
