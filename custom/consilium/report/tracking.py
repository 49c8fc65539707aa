"""A run's numbers in MLflow, where the server's administrator wants them; whatever becomes of that, the run goes on.

The numbers, settings and files are those that the server has anyway, and that who submitted the job may download.
"""

import json
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlparse
from urllib.request import url2pathname

from consilium.config.job import JobConfig
from consilium.core.errors import ConfigError
from consilium.core.messages import MetricKey, Observer
from consilium.core.sanitize import shown, tag
from consilium.core.schema import dotted
from consilium.core.storage import private_folder, write_atomic

ARTIFACTS = ("job.yaml", "results.json", "privacy.json", "adapters")
"""What goes to MLflow of a run that came to its end, where the server has it; no picture."""
ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
"""MLflow reports its use to its makers unless it is told not to, waits for minutes, calls a folder outdated, and prints."""
PATIENCE = 60.0
"""Seconds that the end of a run waits for MLflow to take the last numbers and files."""
LONGEST, MOST = 500, 100
"""Characters of a setting, and settings a message, that MLflow takes."""
LONGEST_PART, LONGEST_NAME = 60, 250
"""Characters of a metric's source, and of its whole name: MLflow refuses longer names, and its file store longer files."""
KEPT = Path("server", "mlflow.json")
"""Where the server notes MLflow's name of the run, so that a resumed run goes on in it."""


def check_installed() -> None:
    """Raise ConfigError where there is no MLflow to call."""
    if find_spec("mlflow") is None:
        raise ConfigError("mlflow: is not installed; pip install 'consilium-flare[mlflow]', or leave the option out")


class Tracker:
    """Hands a run's numbers to MLflow in a thread of its own. The first failure ends it, with one line for the observer."""

    def __init__(self, uri: str, folder: Path, config: JobConfig, observer: Observer) -> None:
        self._uri, self._folder, self._config, self._observer = uri, folder, config, observer
        self._todo: queue.SimpleQueue[Callable[[Any, str], None] | None] = queue.SimpleQueue()
        self._over = False
        self._thread = threading.Thread(target=self._work, daemon=True, name="mlflow")
        self._thread.start()

    def metrics(self, source: str, values: Mapping[str, float], step: int) -> None:
        """Note numbers of a site, of the server or of all sites."""
        if self._over or not values:
            return
        now = int(time.time() * 1000)

        def log(client: Any, run: str) -> None:
            from mlflow.entities import Metric

            named = {metric_name(source, name): value for name, value in values.items()}
            client.log_batch(run, [Metric(name, value, now, step) for name, value in named.items()])

        self._todo.put(log)

    def close(self, finished: bool) -> None:
        """Hand over the files of a `finished` run and end; wait for that, but not long."""

        def end(client: Any, run: str) -> None:
            stored = urlparse(client.get_run(run).info.artifact_uri).scheme
            if stored in ("", "file") and urlparse(self._uri).scheme != "file":
                raise ConfigError("its server names a folder of this machine for files; none were written")
            paths = [self._folder / name for name in ARTIFACTS if finished]
            for path in (path for path in paths if path.exists() and not path.is_symlink()):
                if path.is_dir():
                    client.log_artifacts(run, str(path), path.name)
                else:
                    client.log_artifact(run, str(path))
            client.set_terminated(run, "FINISHED" if finished else "KILLED")

        for last in (end, None):
            self._todo.put(last)
        self._thread.join(PATIENCE)
        if self._thread.is_alive():
            self._fail(f"took over {PATIENCE:.0f} seconds for the last numbers")

    def _work(self) -> None:
        try:
            os.environ.update(ENVIRONMENT)
            client, run = self._begin()
            while (do := self._todo.get()) is not None:
                do(client, run)
        except Exception as error:
            self._fail(f"{type(error).__name__}: {error}")

    def _fail(self, why: str) -> None:
        if not self._over:
            self._over = True
            secretless = why.replace(self._uri, "its address")
            text = f"MLflow has stopped, the run goes on without: {shown(' '.join(secretless.split()))}"
            self._observer({"event": "warning", "text": text})

    def _begin(self) -> tuple[Any, str]:
        """Return a client and the run's name in MLflow: the one of before the interruption, or a new one."""
        if urlparse(self._uri).scheme == "file":
            private_folder(Path(url2pathname(urlparse(self._uri).path)))
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        client = MlflowClient(self._uri)
        if (run := self._former(client)) is not None:
            return client, run
        name = self._config.name
        found = client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else client.create_experiment(name)
        run = str(client.create_run(experiment, run_name=self._config.experiment or self._folder.name).info.run_id)
        settings = [Param(tag(key), str(value)[:LONGEST]) for key, value in settings_of(self._config.model_dump()).items()]
        for start in range(0, len(settings), MOST):
            client.log_batch(run, params=settings[start : start + MOST])
        write_atomic(self._folder / KEPT, json.dumps({"run": run}).encode())
        return client, run

    def _former(self, client: Any) -> str | None:
        from mlflow.exceptions import MlflowException

        try:
            run = str(json.loads((self._folder / KEPT).read_text(encoding="utf-8"))["run"])
            client.update_run(run, "RUNNING")
        except (OSError, ValueError, KeyError, TypeError):
            return None
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":  # it went to another MLflow before
                return None
            raise
        return run


def metric_name(source: str, name: str) -> str:
    """Return the name in MLflow of a metric of a site, of the server ("server") or of all sites, at most LONGEST_NAME long.

    One name that MLflow refuses would end the tracking of a run, so no part is empty or too long for a file's name in UTF-8.
    """
    short = [tag(part)[:LONGEST_PART].strip(".") or "-" for part in (source.strip("()"), *flat_name(name).split("/"))]
    return "/".join(short)[:LONGEST_NAME].rstrip("/")


def flat_name(name: str) -> str:
    """Return a metric's name with a class behind a dot: in MLflow's file store "dice" and "dice/cup" cannot both be."""
    key = MetricKey.parse(name)
    return name if key is None else str(MetricKey(key.split, key.stage, key.metric.replace("/", ".")))


def settings_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by dotted name, without those that are not set."""
    return {name: value for name, value in dotted(values).items() if value is not None and value != {}}
