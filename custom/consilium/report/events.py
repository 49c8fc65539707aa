"""TensorBoard's files: writers whose folders and files are the user's alone, and what a site keeps there for itself."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from consilium.messages import Stage
from consilium.report.clean import tag
from consilium.storage import PRIVATE, private_folder
from consilium.tasks.base import Examples

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter  # it and matplotlib take seconds to import: where something is drawn

FOLDER = "tb_events"
PICTURES = 20
"""A run has pictures of at most about so many rounds, evenly spread, the last one among them."""
Complain = Callable[[str], None]


def event_writer(folder: Path) -> "SummaryWriter":
    """Return a writer into `folder`, which nobody else may open."""
    from torch.utils.tensorboard import SummaryWriter

    private_folder(folder).chmod(0o700)
    writer = SummaryWriter(str(folder))
    for file in folder.iterdir():
        file.chmod(PRIVATE)
    return writer


class SiteEvents:
    """What a site shows its own people while it trains: scores, rates, sizes, and pictures of the same validation samples.

    All stays in `folder`. Whatever goes wrong is told to `complain`, once, and costs training nothing.
    """

    def __init__(self, folder: Path, rounds: int, complain: Complain) -> None:
        self.folder, self.complain = folder, complain
        self._every, self._rounds = -(-rounds // PICTURES), rounds
        self._writer: SummaryWriter | None = None
        self._broken = False

    def draws(self, round: int) -> bool:
        """Tell whether the pictures of this round are wanted."""
        return not self._broken and (round % self._every == 0 or round == self._rounds - 1)

    def step(self, number: int, values: Mapping[str, float]) -> None:
        """Note numbers of one optimizer step of the run."""
        self._try(lambda writer: self._scalars(writer, values, number))

    def round(self, round: int, values: Mapping[str, float]) -> None:
        """Note numbers of a round, and have all that was noted written."""

        def write(writer: "SummaryWriter") -> None:
            self._scalars(writer, values, round)
            writer.flush()

        self._try(write)

    def pictures(self, round: int, stage: Stage, make: Callable[[], Examples | None]) -> None:
        """Draw what a model says of the samples that `make` returns, None for a task without pictures."""
        if not self.draws(round):
            return

        def write(writer: "SummaryWriter") -> None:
            if (found := make()) is not None:
                from consilium.report.predictions import drawn

                writer.add_image(f"validation/{stage}", drawn({stage: found}), round, dataformats="HWC")

        self._try(write)

    def close(self) -> None:
        """Close the files."""
        if self._writer is not None:
            with suppress(Exception):  # what could not be written was told
                self._writer.close()
            self._writer = None

    @staticmethod
    def _scalars(writer: "SummaryWriter", values: Mapping[str, float], place: int) -> None:
        for name, value in values.items():
            writer.add_scalar(tag(name), value, place)

    def _try(self, write: "Callable[[SummaryWriter], None]") -> None:
        if self._broken:
            return
        try:
            self._writer = self._writer or event_writer(self.folder)
            write(self._writer)
        except Exception as error:
            self._broken = True
            self.complain(f"{FOLDER}: {type(error).__name__}: {error}")
