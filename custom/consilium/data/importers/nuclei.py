"""Nuclei in histology from arrays and polygons: PanNuke, MoNuSeg, MoNuSAC. Masks have 1 for nucleus, or classes (--types)."""

import re
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
from PIL import Image, ImageDraw

from consilium.core.errors import DataError
from consilium.data import pictures
from consilium.data.importers.base import (
    NO_PATIENTS,
    DerivedFile,
    Importer,
    ImportResult,
    Options,
    SourceSample,
    by_stem,
    child,
    files,
    folders,
    mask_png,
    partner,
    png,
    wrong_layout,
)
from consilium.data.site_names import slug

NUCLEUS = {"nucleus": [1]}
PANNUKE_TYPES = ["neoplastic", "inflammatory", "connective", "dead", "epithelial"]
"""PanNuke's mask channels 0 to 4; channel 5 is background."""
MONUSAC_TYPES = ["epithelial", "lymphocyte", "macrophage", "neutrophil"]
FOLDS = {"1": "training", "2": "validation", "3": "test"}
PANNUKE_LAYOUT = "fold folders such as 'Fold 1' with images/fold1/images.npy and types.npy, and masks/fold1/masks.npy"
MONUSEG_LAYOUT = "a folder with 'Tissue Images'/*.tif and Annotations/*.xml, and perhaps MoNuSegTestData with both together"
MONUSAC_LAYOUT = "a folder per patient, named by TCGA barcode, with *.tif or *.svs and an *.xml of the same name"


def _classes(types: list[str]) -> dict[str, list[int]]:
    return {name: [value] for value, name in enumerate(types, start=1)}


def read_pannuke(source: Path, options: Options) -> ImportResult:
    """Read PanNuke's arrays, a site per tissue type; pictures and masks become PNG, because arrays are not pictures.

    With folds 1, 2 and 3 these are training, validation and test, the publisher's first rotation; with fewer, pictures are
    split, because patients are not named.
    Raises DataError for another layout.
    """
    arrays = [path for path in files(source, ["images.npy"]) if path.name == "images.npy"]
    numbers = {_fold_number(source, path) for path in arrays}
    if not arrays:
        raise wrong_layout(source, PANNUKE_LAYOUT)
    published = numbers == set(FOLDS) and len(arrays) == len(FOLDS) and not options.resplit
    found = [one for path in arrays for one in _read_fold(source, path, published, options.types)]
    rotation = "folds 1, 2 and 3 are training, validation and test; --validation and --test are not used"
    note = rotation if published else f"pannuke: {NO_PATIENTS}"
    return ImportResult(found, _classes(PANNUKE_TYPES) if options.types else NUCLEUS, [note])


def _fold_number(source: Path, path: Path) -> str:
    """Return the fold's number from the folders' names below the source, "" without one."""
    found = re.findall(r"fold[ _-]*(\d+)", str(path.parent.relative_to(source)).lower() or source.name.lower())
    return found[-1] if found else ""


def _read_fold(source: Path, path: Path, published: bool, types: bool) -> list[SourceSample]:
    images, masks, tissues = _load(path), _load(_masks_beside(source, path)), _load(path.with_name("types.npy"))
    if not len(images) == len(masks) == len(tissues) or masks.ndim != 4 or masks.shape[3] < len(PANNUKE_TYPES):
        shapes = ", ".join(str(array.shape) for array in (images, masks, tissues))
        raise DataError(f"{path}: expected N images (N, H, W, 3), masks (N, H, W, 6) and N types; found {shapes}")
    fold = _fold_number(source, path)
    start = f"fold{fold}" if fold else slug(str(path.parent.relative_to(source))) or "pannuke"
    found = []
    for index, tissue in enumerate(tissues):
        name, site = f"{start}-{index:05d}", slug(str(tissue))
        image = DerivedFile(
            "images", f"{name}.png", partial(lambda images, index: png(np.clip(images[index], 0, 255)), images, index)
        )
        label = mask_png(name, _pannuke_mask, masks, index, types)
        found.append(SourceSample(site, name, image, label, split=FOLDS[fold] if published else None))
    return found


def _masks_beside(source: Path, path: Path) -> Path:
    """Return masks.npy in the same folder, or where the path says masks instead of images."""
    parts = ["masks" if part.lower() == "images" else part for part in path.parent.relative_to(source).parts]
    found = next((p for p in (path.with_name("masks.npy"), source.joinpath(*parts, "masks.npy")) if p.is_file()), None)
    if found is None:
        raise wrong_layout(path.parent, f"masks.npy there, or in {source.joinpath(*parts)}")
    return found


def _load(path: Path) -> np.ndarray:
    try:
        return np.load(path, mmap_mode="r")
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: expected a NumPy array; found none that can be read ({error})") from None


def _pannuke_mask(masks: np.ndarray, index: int, types: bool) -> np.ndarray:
    present = np.asarray(masks[index, :, :, : len(PANNUKE_TYPES)]) > 0
    numbers = np.arange(1, len(PANNUKE_TYPES) + 1) if types else 1
    return (present * numbers).max(axis=2)


def read_monuseg(source: Path, options: Options) -> ImportResult:
    """Read MoNuSeg: 'Tissue Images'/NAME.tif with Annotations/NAME.xml; MoNuSegTestData, if there, is the test split.

    One site, because the names tell patients (TCGA barcodes) but no organs; --sites deals the patients out.
    Raises DataError for another layout.
    """
    found = [_polygons("monuseg", image, xml, None, None) for image, xml in _monuseg_training(source)]
    if not found:
        raise wrong_layout(source, MONUSEG_LAYOUT)
    kept = next((one for one in folders(source) if one.name.lower().replace(" ", "").startswith("monusegtestdata")), None)
    if kept is not None:
        annotations = by_stem(files(kept, [".xml"]))
        for image in files(kept, [".tif"]):
            xml = partner(image.stem, annotations, image, "annotation (*.xml)")
            found.append(_polygons("monuseg", image, xml, None, "test"))
    return ImportResult(found, NUCLEUS)


def _monuseg_training(source: Path) -> list[tuple[Path, Path]]:
    found = []
    for folder in folders(source):
        images, annotations = child(folder, "Tissue Images"), child(folder, "Annotations")
        if images and annotations:
            xmls = by_stem(files(annotations, [".xml"]))
            found += [(p, partner(p.stem, xmls, p, "annotation (*.xml)")) for p in files(images, [".tif"])]
    return found


def read_monusac(source: Path, options: Options) -> ImportResult:
    """Read MoNuSAC: a folder per patient, pictures TCGA-HH-PPPP-..._N.tif (else .svs) with polygons in .xml of that name.

    A site per hospital: the second field of the TCGA barcode. Patients below a folder whose name has "Testing" are the
    publisher's test split. Regions named Ambiguous stay background.
    Raises DataError for another layout.
    """
    found = []
    for xml in files(source, [".xml"]):
        image = next((p for e in (".tif", ".svs") if (p := xml.with_suffix(e)).is_file()), None)
        if image is None:
            raise DataError(f"{xml}: expected {xml.stem}.tif or .svs beside it; found none; complete the set")
        if not re.match(r"TCGA-\w+-\w+", xml.stem):
            raise DataError(f"{xml}: expected a name that starts with a TCGA barcode (TCGA-A2-A0ES); found {xml.stem}")
        test = any("testing" in part.lower() for part in xml.relative_to(source).parts[:-1])
        types = MONUSAC_TYPES
        site = slug("tcga-" + xml.stem.split("-")[1])
        found.append(_polygons(site, image, xml, (types, options.types), "test" if test else None))
    if not found:
        raise wrong_layout(source, MONUSAC_LAYOUT)
    return ImportResult(found, _classes(MONUSAC_TYPES) if options.types else NUCLEUS)


def _polygons(site: str, image: Path, xml: Path, types: tuple[list[str], bool] | None, split: str | None) -> SourceSample:
    """Return a sample whose mask is drawn from an Aperio XML's regions; its patient is the barcode's first three fields."""
    patient = "-".join(image.stem.split("-")[:3])
    return SourceSample(site, patient, image, mask_png(image.stem, _draw, image, xml, types), split=split, is_patient=True)


def _draw(image: Path, xml: Path, types: tuple[list[str], bool] | None) -> np.ndarray:
    """Return the filled regions, as 1 or by type; later regions lie on top."""
    canvas = Image.new("L", pictures.size(image)[::-1], 0)
    draw = ImageDraw.Draw(canvas)
    try:
        root = ElementTree.parse(xml).getroot()
        for annotation in root.iter("Annotation"):
            value = 1 if types is None else _type_value(xml, annotation, *types)
            for region in annotation.iter("Region"):
                points = [(float(v.attrib["X"]), float(v.attrib["Y"])) for v in region.iter("Vertex")]
                if value and len(points) > 2:
                    draw.polygon(points, fill=value)
    except (OSError, ElementTree.ParseError, KeyError, ValueError) as error:
        raise DataError(f"{xml}: expected Aperio regions of vertices with X and Y; found otherwise ({error})") from None
    return np.asarray(canvas)


def _type_value(xml: Path, annotation: ElementTree.Element, types: list[str], apart: bool) -> int:
    """Return the label value of an annotation's cell class, 0 for Ambiguous."""
    names = [one.attrib.get("Name", "").strip().lower() for one in annotation.iter("Attribute")]
    name = names[0] if names else ""
    if name == "ambiguous" or not any(True for _ in annotation.iter("Region")):
        return 0
    if name not in types:
        raise DataError(f"{xml}: expected a class of {', '.join(types)} or ambiguous; found {name!r}")
    return types.index(name) + 1 if apart else 1


SETS = {
    "pannuke": Importer(PANNUKE_LAYOUT, read_pannuke, has_types=True),
    "monuseg": Importer(MONUSEG_LAYOUT, read_monuseg),
    "monusac": Importer(MONUSAC_LAYOUT, read_monusac, has_types=True),
}
