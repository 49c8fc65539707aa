"""A run in MLflow: by MLflow's own client on its own store; a server that is away, slow or wrong costs a line and no time."""

import json
import os
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from consilium.config.site import Given, TrackingConfig, find_site
from consilium.core.errors import ConfigError
from consilium.core.messages import Payload
from consilium.core.schema import validate
from consilium.report import tracking
from consilium.report.run_files import RunLog
from consilium.report.tracking import ENVIRONMENT, Tracker, metric_name
from consilium.strategies.strategy import ServerState
from tests.adversary.network.modes import open_to_others
from tests.conftest import run as command, small_config

CONFIG = small_config("fedit", rounds=1)


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


def client_at(uri: str) -> Any:
    """Return MLflow's client of a store."""
    from mlflow.tracking import MlflowClient  # here: a second, in every worker otherwise

    return MlflowClient(uri)


def record(folder: Path, uri: str, observer: Callable = print, resume: bool = False, rounds: int = 1) -> None:
    """Write the record of a run of one site and `rounds` rounds, from the first or from the second one on."""
    log = RunLog(folder, CONFIG, resume, partial(Tracker, uri, folder, CONFIG, observer))
    log.record_resume(ServerState(1, 0, {}, {})) if resume else log.record_run_start(CONFIG.strategy, {})
    for round in range(1 if resume else 0, rounds):
        log.record_result("site-1", Payload(round, 0, {"x": torch.tensor([3.0, 4.0])}, metrics={"train/loss": 0.5 + round}))
        log.record_phase_end(ServerState(round, 0, {}, {}), ["site-1"], 0.25)
    if rounds > 1 or resume:
        log.record_final_scores("site-1", Payload(rounds, 0, {}, metrics={"test/global/dice": 0.75}))
        (folder / "adapters").mkdir(exist_ok=True)
        (folder / "adapters" / "weights").write_text("shared")
        (folder / "predictions.png").write_text("a patient")
        log.finish()
    log.close()


def test_settings_numbers_and_what_may_leave_go_to_one_run_also_after_a_resumption(tmp_path: Path) -> None:
    uri = (tmp_path / "my store").as_uri()
    before = os.umask(0o022)
    record(tmp_path / "run", uri)
    client = client_at(uri)
    experiment = client.get_experiment_by_name("small").experiment_id
    (broken,) = client.search_runs([experiment])
    assert broken.info.status == "KILLED"
    record(tmp_path / "run", uri, resume=True, rounds=2)
    os.umask(before)
    (found,) = client.search_runs([experiment])
    assert found.info.run_id == broken.info.run_id
    assert (found.info.status, found.info.run_name) == ("FINISHED", "run")
    assert found.data.params["training.lr"] == "0.003"
    assert found.data.params["strategy.name"] == "fedit"
    losses = client.get_metric_history(found.info.run_id, "site-1/train/loss")
    assert [(one.step, one.value) for one in losses] == [(0, 0.5), (1, 1.5)]
    assert found.data.metrics["mean of sites/test/global/dice"] == 0.75
    assert found.data.metrics["site-1/update/norm"] == 5.0  # of 3 and 4
    assert found.data.metrics["server/privacy/epsilon"] == 0.25
    files = {one.path for folder in (None, "adapters") for one in client.list_artifacts(found.info.run_id, folder)}
    assert files == {"adapters", "adapters/weights", "job.yaml", "results.json"}
    assert found.data.tags.keys() <= {"mlflow.runName"}  # no user, no host, no path
    assert (tmp_path / "my store").stat().st_mode & 0o077 == 0
    assert open_to_others(tmp_path / "run" / "server") == []


def silent() -> tuple[socket.socket, int]:
    """Return a socket that takes connections and never answers."""
    listening = socket.create_server(("127.0.0.1", 0))
    return listening, listening.getsockname()[1]


def test_a_server_that_is_away_costs_one_line_without_its_password(tmp_path: Path) -> None:
    listening, port = silent()
    listening.close()
    observer = Mock()
    record(tmp_path / "run", f"http://ann:hidden@127.0.0.1:{port}", observer, rounds=2)
    (event,) = [call.args[0] for call in observer.call_args_list]
    assert event["event"] == "warning"
    assert event["text"].startswith("MLflow has stopped, the run goes on without: ")
    assert "hidden" not in event["text"]
    assert "\n" not in event["text"]
    assert (tmp_path / "run" / "results.json").is_file()


def test_a_server_that_never_answers_delays_no_round_and_the_end_only_so_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listening, port = silent()
    observer = Mock()
    monkeypatch.setattr(tracking, "PATIENCE", 0.5)
    with listening:
        tracker = Tracker(f"http://127.0.0.1:{port}", tmp_path, CONFIG, observer)
        began = time.monotonic()
        for number in range(1000):
            tracker.send_metrics("site-1", {"train/loss": 1.0}, number)
        assert time.monotonic() - began < 1
        tracker.close(finished=True)
        assert time.monotonic() - began < 5
    (event,) = [call.args[0] for call in observer.call_args_list]
    assert "took over" in event["text"]


def test_another_mlflow_than_before_gets_a_run_of_its_own(tmp_path: Path) -> None:
    for place in ("one", "two"):
        uri = (tmp_path / place).as_uri()
        record(tmp_path / "run", uri, resume=place == "two", rounds=2)
        client = client_at(uri)
        assert len(client.search_runs([client.get_experiment_by_name("small").experiment_id])) == 1


@pytest.mark.parametrize("uri", ["", "here", "ftp://host/x", "http://", "file:", "\x1b[31m"])
def test_no_address(uri: str) -> None:
    with pytest.raises(ConfigError, match=r"tracking: mlflow: .*is not an address of MLflow; write http://HOST:PORT"):
        validate(TrackingConfig, {"mlflow": uri}, Path("tracking"))


def test_a_site_tracks_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "site.yaml").write_text("tracking: {mlflow: 'http://127.0.0.1:1'}\n")
    with pytest.raises(ConfigError, match="a: tracking: only a server tracks runs"):
        find_site("a", Given(tmp_path))


@pytest.mark.parametrize(
    "engine", [pytest.param("inprocess", marks=pytest.mark.slow), pytest.param("flare", marks=pytest.mark.long)]
)
def test_the_same_by_command_in_both_engines(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, uri, folder = tmp_path / "job.yaml", (tmp_path / "store").as_uri(), tmp_path / "run"
    job.write_text(json.dumps(CONFIG.model_dump()))
    words = ("simulate", job, "--sites", "2", "--workspace", folder, "--mlflow", uri, "--engine", engine)
    assert command(monkeypatch, *words) == 0
    client = client_at(uri)
    (found,) = client.search_runs([client.get_experiment_by_name("small").experiment_id])
    assert found.info.status == "FINISHED"
    results = json.loads((folder / "results.json").read_text())
    for site, values in results.items():
        assert found.data.metrics[f"{site}/test/global/dice"] == pytest.approx(values["test/global/dice"])


def test_a_wrong_address_stops_the_command_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(json.dumps(CONFIG.model_dump()))
    assert command(monkeypatch, "simulate", job, "--workspace", tmp_path / "run", "--mlflow", "here") == 2
    assert "--mlflow" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_class_stands_behind_a_dot() -> None:
    """A folder of MLflow's has a file per metric, and none can be a folder too."""
    assert metric_name("a", "test/global/dice") == "a/test/global/dice"
    assert metric_name("a", "test/global/dice/cup") == "a/test/global/dice.cup"
    assert metric_name("a", "train/loss") == "a/train/loss"


@pytest.mark.parametrize("name", ["a/", "a//b", "/abs", "", "..", "x" * 300, "ü" * 200, "/".join("y" * 70 for _ in range(9))])
def test_mlflow_takes_every_name(name: str, tmp_path: Path) -> None:
    """A refused name would end the tracking of the run. The name passes MLflow's own check and fits a file system."""
    from mlflow.utils.validation import _validate_metric_name

    found = metric_name("site-1", name)
    _validate_metric_name(found)
    assert len(found) <= 250
    assert all(0 < len(part.encode()) <= 255 and part != ".." for part in found.split("/"))


def test_no_file_goes_to_a_folder_that_a_foreign_server_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its `artifact_uri` file:///... would have this machine's files written where that server says."""
    events: list[dict[str, Any]] = []
    client = Mock()
    client.get_run.return_value.info.artifact_uri = f"file://{tmp_path}/elsewhere"
    monkeypatch.setattr(Tracker, "_begin", lambda self: (client, "run"))
    (tmp_path / "results.json").write_text("{}")
    Tracker("http://127.0.0.1:9", tmp_path, CONFIG, events.append).close(finished=True)
    assert not client.log_artifact.called
    assert "its server names a folder of this machine" in events[0]["text"]


@pytest.mark.parametrize(
    "uri", ["http://user:S3cr@etpw@127.0.0.1:9", "https://user:S3cr/et@h", "http://h/?token=S3cret", "htp://u:S3cret@h"]
)
def test_no_password_is_taken_or_shown(uri: str) -> None:
    with pytest.raises(ConfigError) as error:
        validate(TrackingConfig, {"mlflow": uri}, Path("tracking"))
    assert "S3cr" not in str(error.value)
