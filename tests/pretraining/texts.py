"""Generated instructions and answers for pre-training the tiny language model: numbers, colours, organs, small errands.

Written for this project from the word lists here and in data/sentences.py; none of it is anybody's text. The errands are others
than the one of the demonstration jobs (how urgent a note is), of which only the words occur here.
"""

from collections.abc import Callable
from zlib import crc32

import numpy as np
from numpy.random import Generator

from consilium.data.synthetic.sentences import COLOURS, FINDINGS, LABELS, NOTES, ORGANS, QUESTIONS, pick_word
from consilium.data.text import Text

THINGS = ("cup", "bed", "card", "bag", "door", "coat", "glove", "mask", "tube", "lamp")
WORK = {
    "heart": "pumps the blood", "lung": "takes in air", "liver": "cleans the blood", "kidney": "makes urine",
    "stomach": "holds the food", "brain": "thinks", "skin": "covers the body", "eye": "sees", "ear": "hears",
    "knee": "bends the leg",
}  # fmt: skip
Errand = tuple[str, str, str]
ALL_FINDINGS = tuple(finding for found in FINDINGS.values() for finding in found)


def make_text(rng: Generator) -> Text:
    """Return one generated record."""
    errand = ERRANDS[int(rng.integers(len(ERRANDS)))]
    instruction, given, answer = errand(rng)
    return Text("generated", instruction, given, (answer,))


def make_texts(seed: int, split: str, count: int) -> list[Text]:
    """Return `count` records; equal seeds, splits and counts give equal records."""
    rng = np.random.default_rng([seed, crc32(split.encode())])
    return [make_text(rng) for _ in range(count)]


def _colour(rng: Generator) -> Errand:
    thing, colour = pick_word(rng, THINGS), pick_word(rng, COLOURS)
    asked = pick_word(rng, ("What colour is the {}?", "Tell the colour of the {}.")).format(thing)
    return asked, f"The {thing} near the {pick_word(rng, THINGS)} is {colour}.", f"The {thing} is {colour}."


def _add(rng: Generator) -> Errand:
    a, b = (int(n) for n in rng.integers(0, 10, 2))
    return pick_word(rng, ("Add the numbers.", "How many are they together?")), f"{a} and {b}", f"{a} + {b} = {a + b}"


def _larger(rng: Generator) -> Errand:
    a, b = (int(n) for n in rng.choice(30, 2, replace=False))
    return pick_word(rng, ("Which number is larger?", "Tell the larger number.")), f"{a} or {b}", str(max(a, b))


def _work(rng: Generator) -> Errand:
    organ = pick_word(rng, ORGANS)
    asked = pick_word(rng, ("What does the {} do?", "Tell the work of the {}.")).format(organ)
    return asked, "", f"The {organ} {WORK[organ]}."


def _which(rng: Generator) -> Errand:
    organ = pick_word(rng, ORGANS)
    return "Which organ does this?", f"It {WORK[organ]}.", f"The {organ}."


def _repeat(rng: Generator) -> Errand:
    sets = (THINGS, ORGANS, COLOURS, LABELS)
    words = " ".join(pick_word(rng, sets[int(rng.integers(len(sets)))]) for _ in range(int(rng.integers(2, 5))))
    return pick_word(rng, ("Repeat the words.", "Say it again.")), words, words


def _note(rng: Generator) -> tuple[str, str, str]:
    """Return (note, finding, organ); notes as in the jobs, though nothing here tells how urgent they are."""
    finding, organ = pick_word(rng, ALL_FINDINGS), pick_word(rng, ORGANS)
    words = {"finding": finding, "organ": organ, "colour": pick_word(rng, COLOURS), "days": int(rng.integers(1, 30))}
    return pick_word(rng, NOTES).format(**words), finding, organ


def _organ(rng: Generator) -> Errand:
    note, _, organ = _note(rng)
    return pick_word(rng, ("Which organ is in the note?", "Name the organ.")), note, f"{organ}."


def _finding(rng: Generator) -> Errand:
    note, finding, organ = _note(rng)
    return pick_word(rng, ("What was found?", "Sum up the note.")), note, f"{finding} of the {organ}."


def _question(rng: Generator) -> Errand:
    asked = pick_word(rng, QUESTIONS)
    return "Copy the question.", asked, asked


def _label(rng: Generator) -> Errand:
    label = pick_word(rng, LABELS)
    return "Write the word before the colon.", f"{label}: {pick_word(rng, THINGS)}", label


ERRANDS: tuple[Callable[[Generator], Errand], ...] = (
    _colour, _add, _larger, _work, _which, _repeat, _organ, _finding, _question, _label,
)  # fmt: skip
