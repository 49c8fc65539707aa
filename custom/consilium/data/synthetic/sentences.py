"""Generated instruction data with chosen skews between sites: short ward notes to classify, and codes to translate.

Notes are classified as urgent, soon or later. This needs few directions of a model's weights. A code stands for two words
that the model can only memorise, so learning takes about as many directions as there are codes: the update has a long spectrum.

*Appearance* changes how a site writes, P(x): which of several wordings it prefers for notes and questions. *Annotation* is
the imbalance of a site's labels, P(y), in training and validation. The test split has equally many records of each label. The
meaning of findings and codes is the same at every site. The records are made up: every word is drawn from the lists below.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import numpy as np
from numpy.random import Generator

from consilium.core.seeding import seed_for
from consilium.data.synthetic.drawing import read_spec

LABELS = ("urgent", "soon", "later")
ORGANS = ("heart", "lung", "liver", "kidney", "stomach", "brain", "skin", "eye", "ear", "knee")
COLOURS = ("red", "blue", "green", "white", "black", "yellow", "grey", "brown")
FINDINGS = {
    "urgent": ("bleeding", "a rupture", "a stroke", "a burn"),
    "soon": ("swelling", "a fever", "a stone", "a cough"),
    "later": ("an itch", "a scar", "a spot", "dry scales"),
}
NOTES = (
    "{finding} of the {organ} for {days} days.",
    "the {organ} has {finding}, first seen {days} days ago.",
    "bed {days}: {finding}, {organ}, {colour} card.",
    "day {days}. the patient reports {finding} near the {organ}.",
)
CODED = ("bed {bed}: code {code}.", "code {code} at bed {bed}.")
CODES = 48
QUESTIONS = ("How soon must this note be read?", "Sort the note.", "Tell how urgent the note is.")


def make_texts(folder: Path, spec: dict[str, Any], counts: Mapping[str, int]) -> Path:
    """Write training.jsonl, validation.jsonl and test.jsonl for one site into `folder` and return it.

    `spec`: the kind (a key of RECORDS), the site, the seed, and the strengths of the two skews, `appearance` and `annotation`
    (0 to 1). `counts`: records per split. Nothing is written if the folder holds data of the same arguments.
    """
    known = folder / "phantoms.json"
    if read_spec(known) == {**spec, **counts}:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in counts.items():
        lines = [json.dumps(RECORDS[spec["kind"]](spec, split, index)) for index in range(count)]
        (folder / f"{split}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    known.write_text(json.dumps({**spec, **counts}))
    return folder


def site_probabilities(seed: int, site: str, what: str, count: int, strength: float) -> np.ndarray:
    """Return a site's probabilities (count,) of labels or wordings: equal at strength 0, with ratios up to about 50 at 1."""
    draws = np.random.default_rng(seed_for(seed, "sentences", site, what)).uniform(-1, 1, count)
    weights = np.exp(2 * strength * draws / max(np.abs(draws).max(), 1e-9))
    return weights / weights.sum()


def _synthetic_record(spec: dict, split: str, index: int) -> dict[str, str]:
    """Return record `index` of a split: the instruction, input and output."""
    rng = np.random.default_rng(seed_for(spec["seed"], "sentences", spec["site"], split, index))
    own = {
        what: site_probabilities(spec["seed"], spec["site"], what, len(of), spec[skew])
        for what, of, skew in (
            ("label", LABELS, "annotation"),
            ("note", NOTES, "appearance"),
            ("question", QUESTIONS, "appearance"),
        )
    }
    label = LABELS[index % len(LABELS)] if split == "test" else str(rng.choice(LABELS, p=own["label"]))
    finding = pick_word(rng, FINDINGS[label])
    words = {
        "finding": finding,
        "organ": pick_word(rng, ORGANS),
        "colour": pick_word(rng, COLOURS),
        "days": int(rng.integers(1, 30)),
    }
    note = str(rng.choice(NOTES, p=own["note"])).format(**words)
    question = str(rng.choice(QUESTIONS, p=own["question"]))
    return {"instruction": question, "input": note, "output": f"{label}: {finding} of the {words['organ']}."}


def pick_word(rng: Generator, words: tuple[str, ...]) -> str:
    """Return one of `words`, drawn uniformly."""
    return words[int(rng.integers(len(words)))]


def _make_code_record(spec: dict, split: str, index: int) -> dict[str, str]:
    rng = np.random.default_rng(seed_for(spec["seed"], "codes", spec["site"], split, index))
    seen = site_probabilities(spec["seed"], spec["site"], "code", CODES, spec["annotation"])
    wordings = site_probabilities(spec["seed"], spec["site"], "coded", len(CODED), spec["appearance"])
    meanings = np.random.default_rng(seed_for(spec["seed"], "codes"))  # the same at every site
    codes = meanings.permutation([f"{letter}{digit}" for letter in ascii_lowercase for digit in range(10)])[:CODES]
    stands = {str(code): f"{pick_word(meanings, COLOURS)} {pick_word(meanings, ORGANS)}" for code in codes}
    code = [*stands][index % CODES] if split == "test" else str(rng.choice([*stands], p=seen))
    note = str(rng.choice(CODED, p=wordings)).format(code=code, bed=int(rng.integers(1, 60)))
    return {"instruction": "Read the code.", "input": note, "output": stands[code]}


RECORDS = {"sentences": _synthetic_record, "codes": _make_code_record}
"""For each kind, a function of (spec of the data, split, number) that returns a record."""
