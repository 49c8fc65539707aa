"""Hospitals whose DICOM files bear identifiers that nobody can mistake, and a search for them."""

from pathlib import Path

import pytest

from consilium.data.synthetic.phantoms import make_phantoms

pydicom = pytest.importorskip("pydicom", reason="needs consilium-flare[dicom]")

MARK = "987654321"
"""Part of every identifier below."""
TEXTS = {
    "PatientID": f"PID{MARK}",
    "PatientName": f"Zyxwv{MARK}^Qqjohanna",
    "AccessionNumber": f"ACC{MARK}",
    "InstitutionName": f"Klinikum{MARK}",
    "ReferringPhysicianName": f"Doktor{MARK}",
    "StudyID": f"S{MARK}",
}


def marked(file: Path) -> None:
    """Put identifiers into a file that nobody can mistake, its UIDs among them, equal where they were equal."""
    elements = pydicom.dcmread(file)
    for keyword, value in TEXTS.items():
        setattr(elements, keyword, value)
    for element in elements.iterall():
        if element.VR == "UI" and str(element.value).startswith("2.25."):
            element.value = f"2.25.{MARK}{str(element.value)[5:24]}"
    elements.file_meta.MediaStorageSOPInstanceUID = elements.SOPInstanceUID
    elements.save_as(file)


def hospitals(folder: Path) -> dict[str, Path]:
    """Return the data lists of two sites, each with marked DICOM studies."""
    lists = {n: make_phantoms(folder / n, "organ", n, 1, 2, 1, 1, 32, 0.3, 0.3, "dicom") for n in ("site-1", "site-2")}
    for file in folder.rglob("*.dcm"):
        marked(file)
    return lists


def holding(folder: Path) -> list[str]:
    """Return the files, and the names, in which a mark stands, as text of one byte or two a letter."""
    wanted = [text.encode(code) for text in (MARK, "Zyxwv", "Qqjohanna") for code in ("utf-8", "utf-16-le")]
    files = [path for path in folder.rglob("*") if path.is_file()]
    named = [str(path) for path in folder.rglob("*") if MARK in path.name]
    return named + [str(path) for path in files if any(word in path.read_bytes() for word in wanted)]
