"""Importers of nuclei in histology, drawn as arrays or polygons: PanNuke, MoNuSeg, MoNuSAC.

Masks have the value 1 for every nucleus, or with --types a value per class of cell.
"""

import re
from functools import partial
from math import isfinite
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from consilium.core.errors import DataError
from consilium.data import pictures
from consilium.data.folders import slug, walk_folders
from consilium.data.importers.base import (
    GIVE,
    NO_PATIENTS,
    DerivedFile,
    Importer,
    ImportResult,
    Options,
    SourceSample,
    by_stem,
    encode_png,
    find_files,
    find_partner,
    find_subfolder,
    mask_png,
    read_xml,
    wrong_layout,
)
from consilium.data.safe_open import MOST_SLIDE, wrap_decoding_errors

NUCLEUS = {"nucleus": [1]}
PANNUKE_TYPES = ["neoplastic", "inflammatory", "connective", "dead", "epithelial"]
"""PanNuke's mask channels 0 to 4; channel 5 is background."""
MONUSAC_TYPES = ["epithelial", "lymphocyte", "macrophage", "neutrophil"]
FOLDS = {"1": "training", "2": "validation", "3": "test"}


def _classes(types: list[str], options: Options) -> dict[str, list[int]]:
    return {name: [value] for value, name in enumerate(types, start=1)} if options.types else NUCLEUS


def read_pannuke(source: Path, options: Options) -> ImportResult:
    """Read PanNuke's arrays, a site per tissue type. Pictures and masks are written as PNG, because one array holds many.

    Folds 1, 2 and 3 become training, validation and test, the publisher's first rotation. With fewer folds, the split is by
    picture, because patients are not named. Raises DataError for another layout.
    """
    arrays = [path for path in find_files(source, ["images.npy"]) if path.name == "images.npy"]
    numbers = dict[Path, str]()
    for path in arrays:  # the number of the fold in the names of its folders, else in the source's name
        named = re.findall(r"fold[ _-]*(\d+)", str(path.parent.relative_to(source)).lower() or source.name.lower())
        numbers[path] = named[-1] if named else ""
    published = sorted(numbers.values()) == sorted(FOLDS) and not options.resplit
    values = np.arange(1, len(PANNUKE_TYPES) + 1) if options.types else 1

    def picture(images: np.ndarray, index: int) -> bytes:
        return encode_png(np.clip(images[index], 0, 255))

    def labels(masks: np.ndarray, index: int) -> np.ndarray:
        return ((np.asarray(masks[index, :, :, : len(PANNUKE_TYPES)]) > 0) * values).max(axis=2)

    found = []
    for path, fold in numbers.items():
        parts = ["masks" if part.lower() == "images" else part for part in path.parent.relative_to(source).parts]
        beside = next((p for p in (path.with_name("masks.npy"), source.joinpath(*parts, "masks.npy")) if p.is_file()), None)
        if beside is None:
            raise wrong_layout(path.parent, f"masks.npy there, or in {source.joinpath(*parts)}")
        images, masks, tissues = _load_array(path), _load_array(beside), _load_array(path.with_name("types.npy"))
        if not len(images) == len(masks) == len(tissues) or masks.ndim != 4 or masks.shape[3] < len(PANNUKE_TYPES):
            shapes = ", ".join(str(array.shape) for array in (images, masks, tissues))
            raise DataError(f"{path}: expected N images (N, H, W, 3), masks (N, H, W, 6) and N types; found {shapes}")
        start = f"fold{fold}" if fold else slug(str(path.parent.relative_to(source))) or "pannuke"
        for index, tissue in enumerate(tissues):
            name = f"{start}-{index:05d}"
            image = DerivedFile("images", f"{name}.png", partial(picture, images, index))
            label, split = mask_png(name, labels, masks, index), FOLDS[fold] if published else None
            found.append(SourceSample(slug(str(tissue)), name, image, label, split=split))
    rotation = "folds 1, 2 and 3 are training, validation and test; --validation and --test are not used"
    return ImportResult(found, _classes(PANNUKE_TYPES, options), [rotation if published else f"pannuke: {NO_PATIENTS}"])


def _load_array(path: Path) -> np.ndarray:
    with wrap_decoding_errors(path, "cannot be read as a NumPy array", GIVE, MOST_SLIDE):
        return np.load(path, mmap_mode="r")


def read_monuseg(source: Path, options: Options) -> ImportResult:
    """Read MoNuSeg: 'Tissue Images'/NAME.tif with Annotations/NAME.xml. MoNuSegTestData, if present, is the test split.

    All samples are one site, because names show the patient (TCGA barcode) but not the organ; --sites deals patients out to
    several. Raises DataError for another layout.
    """
    kept = next((one for one in walk_folders(source) if one.name.lower().replace(" ", "").startswith("monusegtestdata")), None)
    both = ((find_subfolder(one, "Tissue Images"), find_subfolder(one, "Annotations")) for one in walk_folders(source))
    parts: list[tuple[Path, Path, str | None]] = [(one, two, None) for one, two in both if one and two]
    parts += [(kept, kept, "test")] if parts and kept else []
    found = []
    for images, annotations, split in parts:
        xmls = by_stem(find_files(annotations, [".xml"]))
        for image in find_files(images, [".tif"]):
            found.append(
                _sample_from_polygons(
                    "monuseg", image, find_partner(image.stem, xmls, image, "annotation (*.xml)"), None, split
                )
            )
    return ImportResult(found, NUCLEUS)


def read_monusac(source: Path, options: Options) -> ImportResult:
    """Read MoNuSAC: a folder per patient, pictures TCGA-HH-PPPP-..._N.tif (else .svs) with polygons in an .xml of that name.

    Each hospital, the second field of the TCGA barcode, is a site. Patients below a folder with "Testing" in its name are the
    publisher's test split. Regions named Ambiguous become background. Raises DataError for another layout.
    """
    found = []
    for xml in find_files(source, [".xml"]):
        image = next((p for e in (".tif", ".svs") if (p := xml.with_suffix(e)).is_file()), None)
        if image is None:
            raise DataError(f"{xml}: expected {xml.stem}.tif or .svs beside it; found none; complete the set")
        if not re.match(r"TCGA-\w+-\w+", xml.stem):
            raise DataError(f"{xml}: expected a name that starts with a TCGA barcode (TCGA-A2-A0ES); found {xml.stem}")
        test = any("testing" in part.lower() for part in xml.relative_to(source).parts[:-1])
        found.append(
            _sample_from_polygons(slug("tcga-" + xml.stem.split("-")[1]), image, xml, options.types, "test" if test else None)
        )
    return ImportResult(found, _classes(MONUSAC_TYPES, options))


def _sample_from_polygons(site: str, image: Path, xml: Path, by_type: bool | None, split: str | None) -> SourceSample:
    """Return a sample whose mask is drawn from an Aperio XML. The first three fields of the barcode are its patient.

    `by_type`: whether each of MoNuSAC's classes has its own label value; None if regions have no class.
    """
    return SourceSample(
        site,
        "-".join(image.stem.split("-")[:3]),
        image,
        mask_png(image.stem, _draw_mask, image, xml, by_type),
        split=split,
        is_patient=True,
    )


def _draw_mask(image: Path, xml: Path, by_type: bool | None) -> np.ndarray:
    """Return label values (H, W) of the filled regions: 1, or a value per class. Later regions cover earlier ones."""
    canvas = Image.new("L", pictures.picture_shape(image)[::-1], 0)
    draw, expected = ImageDraw.Draw(canvas), "Aperio regions of vertices with X and Y"
    try:
        for annotation in read_xml(xml, expected).iterfind("Annotation"):
            regions, value = list(annotation.iterfind("Regions/Region")), 1
            if by_type is not None and regions:
                names = (one.attrib.get("Name", "") for one in annotation.iterfind("Attributes/Attribute"))
                named = next(names, "").strip().lower()
                if named not in (*MONUSAC_TYPES, "ambiguous"):
                    raise DataError(f"{xml}: expected a class of {', '.join(MONUSAC_TYPES)} or ambiguous; found {named!r}")
                value = 0 if named == "ambiguous" else MONUSAC_TYPES.index(named) + 1 if by_type else 1
            for region in regions:
                points = [(float(v.attrib["X"]), float(v.attrib["Y"])) for v in region.iterfind("Vertices/Vertex")]
                if not all(isfinite(x) and isfinite(y) for x, y in points):
                    raise ValueError("a coordinate is no finite number")
                if len(points) > 2 and value:
                    draw.polygon(points, fill=value)
    except (KeyError, ValueError) as error:
        raise DataError(f"{xml}: expected {expected}; found otherwise ({error}); {GIVE}") from None
    return np.asarray(canvas)


SETS = {
    "pannuke": Importer(
        "fold folders such as 'Fold 1' with images/fold1/images.npy and types.npy, and masks/fold1/masks.npy",
        read_pannuke,
        takes=("types",),
    ),
    "monuseg": Importer(
        "a folder with 'Tissue Images'/*.tif and Annotations/*.xml, and perhaps MoNuSegTestData with both together",
        read_monuseg,
    ),
    "monusac": Importer(
        "a folder per patient, named by TCGA barcode, with *.tif or *.svs and an *.xml of the same name",
        read_monusac,
        takes=("types",),
    ),
}
