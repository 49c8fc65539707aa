"""Write TensorBoard's event files, readable by this user only; and a site's own curves and pictures in them."""

import io
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from consilium.core.messages import Stage
from consilium.core.sanitize import tensorboard_tag
from consilium.core.storage import PRIVATE, make_private_folder
from consilium.report.predictions import draw_example_rows
from consilium.report.private_logging import log_failed_drawing
from consilium.tasks.base import Examples

FOLDER = "tb_events"
PICTURES = 20
"""Rounds with pictures, about at most. They are evenly spread and include the last."""
Complain = Callable[[str], None]


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
        from tensorboard.compat.proto.summary_pb2 import Summary

        if values:
            self._add(
                Summary(value=[Summary.Value(tag=tensorboard_tag(name), simple_value=value) for name, value in values.items()]),
                step,
            )

    def add_image(self, title: str, pixels: np.ndarray, step: int) -> None:
        """Add a picture (height, width, 3), uint8."""
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

    def __init__(self, folder: Path, rounds: int, complain: Complain) -> None:
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
        """Draw a model's predictions, which `make` returns, if this round has pictures. None: the task has no pictures."""

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
