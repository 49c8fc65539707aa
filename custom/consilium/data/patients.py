"""Patients: one spelling per identifier, pseudonyms that replace them within this process, and each patient's samples.

Under patient-level privacy, a patient in two spellings would count as two and have twice the bound. So every identifier of a
patient goes through `pseudonym`, whether it comes from a data list, a record, a table or a DICOM file.
"""

import hashlib
import logging
import re
import secrets
import unicodedata
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from consilium.core.errors import DataError
from consilium.core.grouping import group_by_key
from consilium.core.sanitize import INVISIBLE

S = TypeVar("S")
ALIKE = "patients whose identifiers differ by case, punctuation or leading zeros alone"
"""How checks and logs describe such patients."""
_APART = "~"
_LEADING = re.compile(r"(?<!\d)0+(?=\d)")
_log = logging.getLogger(__name__)


def canonical_spelling(identifier: str) -> str:
    """Return the canonical spelling of an identifier, "" for an empty one.

    Characters are normalised by NFKC, so that é is one code point and a full-width digit is a digit. Digits of any script
    become 0 to 9. Invisible characters are removed, blanks at both ends are stripped, and a run of blanks becomes one. A name
    in DICOM's form loses empty components at its end: DOE^JOHN^^ becomes DOE^JOHN.
    """
    shown = "".join(" " if c.isspace() else "" if _is_invisible(c) else c for c in identifier)
    plain = "".join(str(unicodedata.decimal(c, c)) for c in unicodedata.normalize("NFKC", shown))
    text = " ".join(plain.split())
    if "^" not in text:
        return text
    return "=".join(["^".join(part.strip() for part in group.split("^")).rstrip("^") for group in text.split("=")]).rstrip("=")


def _is_invisible(character: str) -> bool:
    return unicodedata.category(character) in ("Cc", "Cf") or character in INVISIBLE


def check_identifier(where: str, key: str, value: str) -> str:
    """Return the canonical spelling of `value`, the `key` (patient or study) at `where`.

    Raises DataError for an invisible character.
    """
    for place, character in enumerate(value.strip(), start=1):
        if _is_invisible(character):
            raise DataError(
                f"{where}: {key} has U+{ord(character):04X} {unicodedata.name(character, 'a control character')} as its "
                f"character {place}, which is invisible; take it out, so that every {key} has one spelling",
                "hidden character",
            )
    return canonical_spelling(value)


def read_identifier(where: str, entry: dict[str, Any], key: str) -> str:
    """Return the canonical spelling of an entry's patient or study, "" if it names none or null.

    Raises DataError for a value that is neither text nor a whole number, and for an invisible character.
    """
    value = "" if entry.get(key) is None else entry[key]
    if isinstance(value, bool) or not isinstance(value, str | int):
        shown = type(value).__name__ if isinstance(value, dict | list) else repr(value)[:80]
        raise DataError(f"{where}: {key} {shown} is neither text nor a whole number; write the identifier of the {key}")
    return check_identifier(where, key, str(value))


def pseudonym(identifier: str) -> str:
    """Return a pseudonym of a patient or study, valid within this process; "" for "".

    Identifiers with an equal `canonical_spelling` have equal pseudonyms; `similar_patient_lines` finds nearly equal
    identifiers. Each process draws a key of its own, which is never written.
    """
    text = canonical_spelling(identifier)
    if not text:
        return ""
    # nearly equal identifiers share the first part: without case, punctuation, blanks and leading zeros
    plain = text.casefold()
    loose = _LEADING.sub("", "".join(c for c in plain if unicodedata.category(c)[0] not in "PSZ")) or plain
    return f"{_keyed_hash(loose)}{_APART}{_keyed_hash(text)}"


def path_pseudonym(path: Path) -> str:
    """Return a pseudonym for a file or folder, for a study without an identifier."""
    return _keyed_hash(f"\0{path}")


def similar_patient_lines(samples: Iterable[tuple[str, str]]) -> list[str]:
    """Return a line per group of patients whose identifiers differ by case, punctuation, blanks or leading zeros alone.

    They may be one person. `samples`: the (pseudonym of its patient, name) of each sample. The line has the name of each
    patient's first sample.
    """
    found: dict[str, dict[str, str]] = {}
    for whose, name in samples:
        if _APART in whose:
            found.setdefault(whose.rpartition(_APART)[0], {}).setdefault(whose, name)
    return [" ~ ".join(group.values()) for group in found.values() if len(group) > 1]


def _keyed_hash(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), key=_key(), digest_size=12).hexdigest()


@cache
def _key() -> bytes:
    """Return this process's key. It is drawn at the first call."""
    return secrets.token_bytes(32)


# samples ----------------------------------------------------------------------------------------------------------------------


def training_indices_by_patient(samples: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
    """Return the indices of every patient's samples, in the list's order.

    Samples without a patient are left out, because their patients could not be protected.
    """
    found = group_by_key((whose, place) for place, item in enumerate(samples) if (whose := item_pseudonym(item)))
    return tuple(map(tuple, found.values()))


def patients_and_most_samples(samples: Sequence[Any]) -> tuple[int, int]:
    """Return the number of patients that samples name, and the largest number of samples of one patient."""
    counts = Counter(whose for item in samples if (whose := item_pseudonym(item)))
    return len(counts), max(counts.values(), default=0)


def samples_by_patient(samples: Sequence[S]) -> list[list[S]]:
    """Return a group of samples per patient, in the order of first samples. A sample without a patient is a group alone."""
    return list(group_by_key((item_pseudonym(item) or place, item) for place, item in enumerate(samples)).values())


def first_linked(keys: Sequence[Iterable[Hashable]]) -> list[int]:
    """Return for each sample the index of the first sample that is linked to it. `keys`: the keys of each sample.

    Samples are linked if they share a key, directly or through other samples.
    """
    from scipy.cluster.hierarchy import DisjointSet  # imported here, because a server loads this module and links nothing

    linked, first, least = DisjointSet(range(len(keys))), dict[Hashable, int](), dict[int, int]()
    for index, own in enumerate(keys):
        for key in own:
            linked.merge(first.setdefault(key, index), index)
    return [least.setdefault(linked[index], index) for index in range(len(keys))]


def warn_of_similar_patients(splits: Mapping[str, Sequence[Any]]) -> None:
    """Warn in the site's own log of patients whose identifiers are nearly equal, because they may be one person."""
    for line in similar_patient_lines(
        (item_pseudonym(item), f"{split}: {item.name}")
        for split, item in ((split, item) for split, items in splits.items() for item in items)
    ):
        _log.warning(f"{ALIKE}: {line}; give one person one identifier")


def item_pseudonym(item: Any) -> str:
    """Return the pseudonym of a sample's patient, "" if unknown."""
    return str(getattr(item, "patient", ""))
