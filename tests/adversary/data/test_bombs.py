"""Small files that ask for memory or hours: each is refused in a line before it has them. Large files in earnest are read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest

from tests.adversary.data import bombs

pytest.importorskip("pydicom", reason="needs consilium-flare[dicom]")
pytest.importorskip("openslide", reason="needs consilium-flare[slides]")

MOST = 2**29
"""Bytes that a bomb may take of memory beside what the process has."""
SECONDS = 20
Bombs = dict[str, Callable[[Path], None]]
XML: Bombs = {
    "texts-laughs.xml": bombs.xml_laughs,
    "texts-entity.xml": bombs.xml_entity,
    "texts-words.xml": bombs.xml_text,
    "texts-elements.xml": bombs.xml_elements,
    "texts-deep.xml": bombs.xml_deep_pages,
    "laughs.xml": bombs.xml_laughs,
    "words.xml": bombs.xml_text,
    "elements.xml": bombs.xml_elements,
    "deep.xml": bombs.xml_deep_regions,
}
QUICK: Bombs = {
    "beyond.dcm": bombs.deflated_beyond,
    "pixels.dcm": bombs.deflated_pixels,
    "private.dcm": bombs.deflated_private,
    "frames.dcm": bombs.many_frames,
    "nested.dcm": bombs.nested,
    "length.dcm": bombs.long_element,
    "code.dcm": bombs.huge_code,
    "lossless.dcm": bombs.huge_lossless_code,
    "precincts.dcm": bombs.precincts,
    "palette.dcm": bombs.segmented_palette,
    "mask-number.dcm": bombs.long_number,
    "voxels.nii.gz": bombs.gzipped_volume,
    "scaled.nii.gz": bombs.gzipped_scaled,
    "extension.nii.gz": bombs.gzipped_extension,
    "voxels.mha": bombs.deflated_metaimage,
    "voxels.nrrd": bombs.gzipped_nrrd,
    "text.png": bombs.png_text,
    "texts.png": bombs.png_texts,
    "scans.jpg": bombs.jpeg_scans,
    "frame.gif": bombs.gif_frame,
    "frames.gif": bombs.gif_pages,
    "pages.tif": bombs.tiff_pages,
    "tiled-pages.tif": bombs.tiff_pages,
    "tile.tif": bombs.tiff_tile,
    "tiled-block.tif": bombs.tiff_block,
    "tiled-slide.svs": bombs.slide_tile,
    "training.jsonl": bombs.one_line,
    "table.csv": bombs.csv_table,
    **XML,
}
"""By the name of the file: what opens it goes by that."""
READ: Bombs = {
    "more.png": bombs.png_pixels,
    "exif.png": bombs.png_exif,
    "tags.tif": bombs.tiff_tags,
    "runs.bmp": bombs.bmp_runs,
    "lines.xml": bombs.xml_lines,
}
"""Those whose picture is within bounds, and read as such: what is behind it, or around it, is left."""
LONG: Bombs = {
    "items.dcm": bombs.items,
    "inflated-items.dcm": bombs.deflated_items,
    "inflated-frames.dcm": bombs.deflated_frames,
    "numbers.dcm": bombs.numbers,
    "runs.dcm": bombs.run_lengths,
    "list.json": bombs.json_list,
    "tiled-jpeg.tif": bombs.tiff_jpeg,
}
LARGE: Bombs = {
    "ct.nii.gz": bombs.large_ct,
    "outlines.xml": bombs.large_outlines,
    "frames.dcm": bombs.large_frames,
    "picture.png": bombs.large_picture,
    "tiled-slide.tif": bombs.large_slide,
}


def took(folder: Path, made: Bombs) -> dict[str, dict[str, Any]]:
    """Write files and return what reading each took, by its name."""
    nibabel.save(nibabel.Nifti1Image(np.zeros((64, 64, 4), np.uint8), np.eye(4)), folder / "image.nii")
    for name, write in made.items():
        write(folder / name)
    return dict(zip(made, bombs.measured([folder / name for name in made], SECONDS), strict=False))


def assert_bounded(found: dict[str, dict[str, Any]], made: Bombs) -> None:
    """Check that each file was refused in a line, or read if it is one of READ, within bounds."""
    assert list(found) == list(made)
    assert {name: one for name, one in found.items() if one["bytes"] > MOST or one["seconds"] > SECONDS} == {}
    assert {name for name, one in found.items() if not one["said"]} == READ.keys() & made.keys()
    assert [one["said"] for one in found.values() if one["said"] and ("; " not in one["said"] or "\n" in one["said"])] == []


@pytest.mark.slow
def test_a_small_file_takes_no_gigabytes(tmp_path: Path) -> None:
    """Claim: reading a file takes no more memory than a file of its size may, and seconds; else one line refuses it.

    Most of these took 2 to 10 GB, or minutes. One child process reads all and measures its resident memory.
    """
    assert_bounded(took(tmp_path, QUICK | READ), QUICK | READ)


@pytest.mark.slow
def test_neither_does_a_longer_one(tmp_path: Path) -> None:
    assert_bounded(took(tmp_path, LONG), LONG)


@pytest.mark.slow
def test_large_files_in_earnest_are_read(tmp_path: Path) -> None:
    """A CT of 262 MB, alone or in frames, a picture of 16 million pixels, a gigapixel by tiles, a slide's 2,000 outlines."""
    found = took(tmp_path, LARGE)
    assert {name: one for name, one in found.items() if one["said"] or one["bytes"] > 3 * 2**29} == {}
    assert max(found[name]["bytes"] for name in ("picture.png", "tiled-slide.tif")) < MOST
