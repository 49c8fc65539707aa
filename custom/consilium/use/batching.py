"""Inputs in their order with what a model says of them: several pictures in one call of the model, a volume by itself."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from consilium.core.errors import DataError
from consilium.data import volumes
from consilium.data.datalist import Item
from consilium.use.inputs import Input
from consilium.use.predictor import ModelInput, Prediction, Predictor

MOST_PIXELS = 2**26
"""Pixels of gathered pictures that are held at once, 200 MB, if one alone has no more."""


def gathered(predictor: Predictor, inputs: Sequence[Input]) -> Iterator[tuple[Input, Iterator[Prediction]]]:
    """Yield every input in order with the model's raw answers of its parts; pictures go into calls of `batch_size`.

    What is wrong with an input is raised where its own answers are iterated, a DataError or an OSError, and costs no other.
    """
    waiting = _Waiting(predictor)
    for one in inputs:
        found = _opened(predictor, one)
        if isinstance(found, list):
            yield from waiting.answers()
            yield one, _alone(predictor, one, found)
            continue
        if not waiting.room(found):
            yield from waiting.answers()
        waiting.found.append((one, found))
    yield from waiting.answers()


def _opened(predictor: Predictor, one: Input) -> ModelInput | list[Item] | Exception:
    """Return a picture, the parts of what has several, or why an input cannot be read."""
    try:
        items = predictor.parts(one)
        if len(items) != 1 or items[0].tile is not None:
            return items
        (picture,) = predictor.loaded(one, items)
    except (DataError, OSError) as error:
        return error
    volumes.forget()  # what waits is held as 8 bits, without its file's values
    return picture


def _alone(predictor: Predictor, one: Input, items: list[Item]) -> Iterator[Prediction]:
    for start in range(0, len(items), predictor.batch_size):
        yield from predictor.ask(list(predictor.loaded(one, items[start : start + predictor.batch_size])))


@dataclass
class _Waiting:
    """Pictures that wait for others, and inputs that cannot be read between them."""

    predictor: Predictor
    found: list[tuple[Input, ModelInput | Exception]] = field(default_factory=list)

    def room(self, more: ModelInput | Exception) -> bool:
        """Tell whether one more may wait."""
        held = [one for _, one in self.found if isinstance(one, ModelInput)]
        if not held or isinstance(more, Exception):
            return True
        pixels = sum(one.image.shape[0] * one.image.shape[1] for one in [*held, more])
        return len(held) < self.predictor.batch_size and pixels <= MOST_PIXELS

    def answers(self) -> Iterator[tuple[Input, Iterator[Prediction]]]:
        """Yield what waited, with its answers, and let go of it."""
        pictures = [one for _, one in self.found if isinstance(one, ModelInput)]
        raw = iter(self.predictor.ask(pictures) if pictures else [])
        for one, found in self.found:
            yield one, _raised(found) if isinstance(found, Exception) else iter([next(raw)])
        self.found = []


def _raised(error: Exception) -> Iterator[Prediction]:
    yield from ()
    raise error
