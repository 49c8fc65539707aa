"""Write TensorBoard's event files, and send a run's numbers to MLflow, if the server's administrator asks for it.

A failure of either never stops the run. TensorBoard's files are readable by this user only. MLflow gets only numbers, settings
and files that the server has, and that the job's submitter may download.
"""

import io
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

import numpy as np
from PIL import Image

from consilium.config.job import JobConfig
from consilium.core.errors import ConfigError
from consilium.core.messages import MetricKey, Observer, Stage
from consilium.core.sanitize import shown, tensorboard_tag
from consilium.core.schema import flatten_settings
from consilium.core.storage import PRIVATE, make_private_folder, write_atomic
from consilium.report.predictions import draw_example_rows
from consilium.report.private_logging import log_failed_drawing
from consilium.tasks.base import Examples

# TensorBoard ------------------------------------------------------------------------------------------------------------

FOLDER = "tb_events"
PICTURES = 20
"""Rounds with pictures, about at most. They are evenly spread and include the last."""


class EventFile:
    """A TensorBoard event file in a folder of its own, private to this user. The first entry creates both.

    Each entry is written to disk at once, and the file is closed in between. torch's SummaryWriter keeps one open file
    and one thread per site. A server may have a thousand sites. Raises OSError if nothing can be written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path: Path | None = None

    def add_scalars(self, values: Mapping[str, float], step: int) -> None:
        """Add the numbers of one step."""
        if values:
            self._add([{"tag": tensorboard_tag(name), "simple_value": value} for name, value in values.items()], step)

    def add_image(self, title: str, pixels: np.ndarray, step: int) -> None:
        """Add a picture (height, width, 3), uint8."""
        png = io.BytesIO()
        Image.fromarray(pixels).save(png, format="PNG")
        height, width, colours = pixels.shape
        one = {"height": height, "width": width, "colorspace": colours, "encoded_image_string": png.getvalue()}
        self._add([{"tag": title, "image": one}], step)

    def _add(self, values: list[dict[str, Any]], step: int) -> None:
        """Add an event with `values`, the fields of Summary.Value in TensorBoard's protocol."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        found = [Event(wall_time=time.time(), step=step, summary={"value": values})]
        if self._path is None:
            make_private_folder(self.folder).chmod(0o700)
            self._path = self.folder / f"events.out.tfevents.{time.time_ns()}"
            found = [Event(wall_time=time.time(), file_version="brain.Event:2"), *found]
        with open(self._path, "ab", opener=lambda name, flags: os.open(name, flags, PRIVATE)) as file:
            for event in found:
                RecordWriter(file).write(event.SerializeToString())


class SiteEvents:
    """A site's own TensorBoard file: scores, learning rates, sizes of updates, and pictures of the same validation samples.

    The file stays in `folder` at the site. An error never stops training: the first one calls `complain` with its kind, and
    then nothing more is written.
    """

    def __init__(self, folder: Path, rounds: int, complain: Callable[[str], None]) -> None:
        self.folder, self.complain = folder, complain
        self._every, self._rounds = -(-rounds // PICTURES), rounds
        self._file, self._broken = EventFile(folder), False

    def is_picture_round(self, round: int) -> bool:
        """Tell whether this round's pictures are drawn."""
        return not self._broken and (round % self._every == 0 or round == self._rounds - 1)

    def write_scalars(self, values: Mapping[str, float], number: int) -> None:
        """Write the numbers of one optimizer step, or of a round."""
        self._try(lambda: self._file.add_scalars(values, number))

    def write_pictures(self, round: int, stage: Stage, make: Callable[[], Examples | None]) -> None:
        """Draw a model's predictions, which `make` returns, if this round has pictures. None: there is nothing to draw."""

        def write() -> None:
            if (found := make()) is not None:
                self._file.add_image(f"validation/{stage}", draw_example_rows({stage: found}), round)

        if self.is_picture_round(round):
            self._try(write)

    def _try(self, write: Callable[[], None]) -> None:
        try:
            if not self._broken:
                write()
        except Exception as error:
            self._broken = True
            self.complain(log_failed_drawing(FOLDER, error))


ARTIFACTS = ("job.yaml", "results.json", "privacy.json", "adapters")
"""Files that MLflow gets at the end of a finished run, if the server has them. No picture is among them."""
ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
"""Settings for MLflow. Without them it reports its use to its makers, waits for minutes, refuses a folder, and prints."""
PATIENCE = 60.0
"""Seconds to wait at the end of a run until MLflow has the last numbers and files."""
LONGEST, MOST = 500, 100
"""Characters per setting, and settings per message, that MLflow accepts."""
LONGEST_PART, LONGEST_NAME = 60, 250
"""Characters of each part of a metric's name, and of the whole name. MLflow and its file store refuse longer ones."""
KEPT = Path("server", "mlflow.json")
"""File with MLflow's id of the run, so that a resumed run continues in it."""


def check_installed() -> None:
    """Raise ConfigError if MLflow is not installed."""
    if find_spec("mlflow") is None:
        raise ConfigError("mlflow: is not installed; pip install 'consilium-flare[mlflow]', or leave the option out")


class Tracker:
    """Sends a run's numbers to MLflow from a thread of its own. The first failure ends this, with a warning to the observer."""

    def __init__(self, uri: str, folder: Path, config: JobConfig, observer: Observer) -> None:
        self._uri, self._folder, self._config, self._observer = uri, folder, config, observer
        self._todo: queue.SimpleQueue[Callable[[Any, str], None] | None] = queue.SimpleQueue()
        self._over = False
        self._thread = threading.Thread(target=self._work, daemon=True, name="mlflow")
        self._thread.start()

    def send_metrics(self, source: str, values: Mapping[str, float], step: int) -> None:
        """Send numbers of a site, of the server or of all sites to MLflow."""
        if self._over or not values:
            return
        now = int(time.time() * 1000)

        def log(client: Any, run: str) -> None:
            from mlflow.entities import Metric

            named = {metric_name(source, name): value for name, value in values.items()}
            client.log_batch(run, [Metric(name, value, now, step) for name, value in named.items()])

        self._todo.put(log)

    def close(self, finished: bool) -> None:
        """Send the files of a `finished` run, and end. Wait for at most PATIENCE seconds."""

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
        """Return a client and MLflow's id of the run: of the interrupted run if there is one, else of a new run."""
        if urlparse(self._uri).scheme == "file":
            make_private_folder(Path(url2pathname(urlparse(self._uri).path)))
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        client = MlflowClient(self._uri)
        try:
            run = str(json.loads((self._folder / KEPT).read_text(encoding="utf-8"))["run"])
            client.update_run(run, "RUNNING")
            return client, run
        except (OSError, ValueError, KeyError, TypeError):
            pass
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":  # it is raised if the run was in another MLflow before
                raise
        name = self._config.name
        found = client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else client.create_experiment(name)
        run = str(client.create_run(experiment, run_name=self._config.experiment or self._folder.name).info.run_id)
        given = {k: value for k, value in flatten_settings(self._config.model_dump()).items() if value not in (None, {})}
        settings = [Param(tensorboard_tag(key), str(value)[:LONGEST]) for key, value in given.items()]
        for start in range(0, len(settings), MOST):
            client.log_batch(run, params=settings[start : start + MOST])
        write_atomic(self._folder / KEPT, json.dumps({"run": run}).encode())
        return client, run


def metric_name(source: str, name: str) -> str:
    """Return a metric's name in MLflow, at most LONGEST_NAME characters. `source`: a site, "server", or the mean of sites.

    A name that MLflow refuses would end the tracking of the run. So no part is empty, or too long for a file's name in UTF-8.
    MLflow's file store cannot have both "dice" and "dice/cup", so there is a dot before a class.
    """
    if (key := MetricKey.parse(name)) is not None:
        name = str(MetricKey(key.split, key.stage, key.metric.replace("/", ".")))
    parts = (source.strip("()"), *name.split("/"))
    return "/".join(tensorboard_tag(part)[:LONGEST_PART].strip(".") or "-" for part in parts)[:LONGEST_NAME].rstrip("/")
