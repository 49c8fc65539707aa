"""What makes two jobs the same: settings, whatever way they are written, and the order of what has one."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from consilium.config.job import JobConfig, load_job
from consilium.core.errors import ConfigError
from consilium.core.schema import read_yaml
from tests.conftest import JOBS, small_config


def digest(**sections: Any) -> str:
    return JobConfig.model_validate(small_config("fedit").model_dump() | sections).digest


def test_the_order_of_classes_is_part_of_a_job() -> None:
    """It says which output of the model stands for which class: a run that goes on must keep it."""
    one, other = ({"name": "segmentation", "classes": classes} for classes in ({"a": [1], "b": [2]}, {"b": [2], "a": [1]}))
    assert digest(task=one) != digest(task=other)


def test_the_order_of_a_models_own_configuration_is_not() -> None:
    shapes = ({"model_type": "llama", "hidden_size": 64}, {"hidden_size": 64, "model_type": "llama"})
    model = {"name": "causal_lm", "variant": "folder", "checkpoint": "${SITE}/lm"}
    task, data = {"name": "language"}, {"phantoms": {"kind": "sentences"}}
    found = {digest(model=model | {"config": shape}, task=task, data=data) for shape in shapes}
    assert len(found) == 1


@pytest.mark.parametrize(
    "server",
    [
        *({"optimizer": name} for name in ("momentum", "adam", "yogi")),
        *({"mean": name} for name in ("weighted", "median", "trimmed")),
        {"optimizer": "adam", "beta2": 0.5, "tau": 0.1, "lr": 0.2},
        {"optimizer": "momentum", "mean": "trimmed", "trim": 0.3},
    ],
)
def test_a_runs_own_job_can_be_read_again_whatever_its_server_does(server: dict[str, Any]) -> None:
    """It has all fields, and is what a resumed run, a worker, `compare` and `predict` read."""
    config = JobConfig.model_validate(small_config("fedit").model_dump() | {"server": server})
    for written in (config.model_dump(), config.model_dump(mode="json")):
        assert JobConfig.model_validate(yaml.safe_load(yaml.safe_dump(written, sort_keys=False))) == config


@pytest.mark.parametrize("job", sorted(path.name for path in JOBS.iterdir() if (path / "app").is_dir()))
def test_a_job_written_out_is_the_same_job(job: str, tmp_path: Path) -> None:
    config = load_job(JOBS / job)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    again = load_job(tmp_path / "job.yaml")
    assert again == config
    assert again.digest == config.digest
    assert load_job(JOBS / job, {"training.rounds": config.training.rounds + 1}).digest == config.digest
    assert load_job(JOBS / job, {"training.seed": config.training.seed + 1}).digest != config.digest


def test_a_strategy_by_its_name_alone_is_that_with_defaults_and_may_be_set() -> None:
    assert digest(strategy="fediat") == digest(strategy={"name": "fediat", "sharing": "M4"})


def test_set_reaches_into_a_strategy_that_the_file_names_only(tmp_path: Path) -> None:
    raw = small_config("fediat").model_dump(mode="json") | {"strategy": "fediat", "privacy": None}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(raw))
    changed = load_job(
        tmp_path / "job.yaml", {"strategy.ema": 0.5, "privacy.unit": "site", "privacy.epsilon": 8, "privacy.clip": 1}
    )
    assert changed.strategy.ema == 0.5
    assert changed.privacy is not None


def test_a_key_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("name: a\ntraining: {rounds: 1, lr: 0.1, rounds: 5}\n")
    with pytest.raises(ConfigError, match=r"line 2: 'rounds'.*keep one"):
        load_job(tmp_path / "job.yaml")


def test_a_map_of_very_many_keys_is_read_in_its_length(tmp_path: Path) -> None:
    """Comparing each key with all others would take a site minutes for a megabyte that a submitter wrote."""
    lines = "".join(f"  k{i}: 1\n" for i in range(20_000))
    (tmp_path / "job.yaml").write_text(f"name: a\nx:\n{lines}")
    assert len(read_yaml(tmp_path / "job.yaml")["x"]) == 20_000
    (tmp_path / "job.yaml").write_text(f"name: a\nx:\n{lines[: lines.index('  k99:')]}  k7: 2\n")
    with pytest.raises(ConfigError, match="'k7' is there twice"):
        read_yaml(tmp_path / "job.yaml")
