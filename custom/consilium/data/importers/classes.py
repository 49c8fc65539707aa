"""Sets with a folder per class: retinal OCT and endoscopy. They have no sites; `consilium data partition` makes some."""

from pathlib import Path

from consilium.data.folders import read_folders
from consilium.data.importers.base import NO_PATIENTS, Found, Importer, Options, Reading, folders, wrong_layout

OCT_CLASSES = ["AMD", "CNV", "CSR", "DME", "DR", "DRUSEN", "MH", "NORMAL"]
KVASIR_CLASSES = [
    "dyed-lifted-polyps",
    "dyed-resection-margins",
    "esophagitis",
    "normal-cecum",
    "normal-pylorus",
    "normal-z-line",
    "polyps",
    "ulcerative-colitis",
]
OCT_LAYOUT = f"train/, val/ and test/ with a folder per class: {', '.join(OCT_CLASSES)}"
KVASIR_LAYOUT = f"a folder per class: {', '.join(KVASIR_CLASSES)}"
NOTE = "one list for all, no sites: share it out with `consilium data partition` of its datalist.json"


def read_oct(source: Path, options: Options) -> Reading:
    """Read OCT-C8 (Kaggle): train, val and test are the publisher's splits."""
    wanted = [f"{split}/{name}" for split in ("train", "val", "test") for name in OCT_CLASSES]
    return _read(source, "oct-c8", OCT_CLASSES, wanted, OCT_LAYOUT, published=True)


def read_kvasir(source: Path, options: Options) -> Reading:
    """Read Kvasir v2 (Simula): no published split and no patients named, so pictures are split class by class."""
    return _read(source, "kvasir-v2", KVASIR_CLASSES, KVASIR_CLASSES, KVASIR_LAYOUT, published=False)


def _read(source: Path, site: str, classes: list[str], wanted: list[str], layout: str, published: bool) -> Reading:
    """Return the pictures of the first folder that has all the folders wanted. Raises DataError."""
    root = next((one for one in folders(source) if all((one / name).is_dir() for name in wanted)), None)
    if root is None:
        raise wrong_layout(source, layout)
    found = [
        Found(site, f"{name}/{picture.name}", picture, name, split=split if published else None)
        for split, picture, name in read_folders(root)
        if name in classes
    ]
    return Reading(found, classes, [NOTE] if published else [NOTE, f"{site}: {NO_PATIENTS}"])


SETS = {"oct-c8": Importer(OCT_LAYOUT, read_oct), "kvasir-v2": Importer(KVASIR_LAYOUT, read_kvasir)}
