"""TensorBoard's files, whose folders and files are the user's alone, and what a site keeps there for itself."""

import io
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from consilium.core.messages import Stage
from consilium.core.sanitize import tag
from consilium.core.storage import PRIVATE, private_folder
from consilium.report.predictions import drawn
from consilium.report.private_logging import undrawn
from consilium.tasks.base import Examples

FOLDER = "tb_events"
PICTURES = 20
"""A run has pictures of at most about so many rounds, evenly spread, the last one among them."""
Complain = Callable[[str], None]


class EventFile:
    """A file of TensorBoard's in a folder of its own, which nobody else may open; both are made with the first entry.

    An entry is on the disk when it was added, and between two nothing is open: torch's SummaryWriter keeps a file and a thread,
    of which a server with a thousand sites would have a thousand. Raises OSError where nothing can be written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path: Path | None = None

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Add numbers of one step."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        if values:
            self._add(Summary(value=[Summary.Value(tag=tag(name), simple_value=value) for name, value in values.items()]), step)

    def image(self, title: str, pixels: np.ndarray, step: int) -> None:
        """Add a picture: uint8, height x width x 3 colours."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        png = io.BytesIO()
        Image.fromarray(pixels).save(png, format="PNG")
        height, width, colours = pixels.shape
        one = Summary.Image(height=height, width=width, colorspace=colours, encoded_image_string=png.getvalue())
        self._add(Summary(value=[Summary.Value(tag=title, image=one)]), step)

    def _add(self, summary: Any, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        found = [Event(wall_time=time.time(), step=step, summary=summary)]
        if self._path is None:
            private_folder(self.folder).chmod(0o700)
            self._path = self.folder / f"events.out.tfevents.{time.time_ns()}"
            found = [Event(wall_time=time.time(), file_version="brain.Event:2"), *found]
        with open(self._path, "ab", opener=lambda name, flags: os.open(name, flags, PRIVATE)) as file:
            for event in found:
                RecordWriter(file).write(event.SerializeToString())


class SiteEvents:
    """What a site shows its own people while it trains: scores, rates, sizes, and pictures of the same validation samples.

    All stays in `folder`. Whatever goes wrong is told to `complain` by its kind, once, and costs training nothing.
    """

    def __init__(self, folder: Path, rounds: int, complain: Complain) -> None:
        self.folder, self.complain = folder, complain
        self._every, self._rounds = -(-rounds // PICTURES), rounds
        self._file, self._broken = EventFile(folder), False

    def draws(self, round: int) -> bool:
        """Tell whether the pictures of this round are wanted."""
        return not self._broken and (round % self._every == 0 or round == self._rounds - 1)

    def step(self, number: int, values: Mapping[str, float]) -> None:
        """Note numbers of one optimizer step of the run."""
        self._try(lambda: self._file.scalars(values, number))

    def round(self, round: int, values: Mapping[str, float]) -> None:
        """Note numbers of a round."""
        self._try(lambda: self._file.scalars(values, round))

    def pictures(self, round: int, stage: Stage, make: Callable[[], Examples | None]) -> None:
        """Draw what a model says of the samples that `make` returns, None for a task without pictures."""

        def write() -> None:
            if (found := make()) is not None:
                self._file.image(f"validation/{stage}", drawn({stage: found}), round)

        if self.draws(round):
            self._try(write)

    def _try(self, write: Callable[[], None]) -> None:
        try:
            if not self._broken:
                write()
        except Exception as error:
            self._broken = True
            self.complain(undrawn(FOLDER, error))
