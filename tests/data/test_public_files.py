"""The public test files of other libraries, and the table of them on the page."""

from pathlib import Path

import nibabel
import numpy as np
import pytest
from PIL import Image

pytest.importorskip("tifffile", reason="needs consilium-flare[slides]")
pytest.importorskip("pydicom", reason="needs consilium-flare[dicom]")

from consilium.core.errors import DataError
from consilium.data import slides, volumes
from tests.data.public_files import BEGIN, END, PAGE, PYTHONS, Outcome, outcomes, table


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    """What becomes of about 260 files, in 3 CPU seconds."""
    return list(outcomes(tmp_path_factory.mktemp("tiff")))


def test_every_file_is_read_as_its_library_does_or_refused_in_one_plain_line(found: list[Outcome]) -> None:
    assert [one for one in found if not one.line and not one.equal] == []
    assert [one.line for one in found if "\n" in one.line or PYTHONS.search(one.line)] == []
    assert all(one.line.startswith(one.file) and ";" in one.line for one in found if one.line)
    assert sum(not one.line for one in found) > 90


def test_files_that_were_once_wrong_are_read(found: list[Outcome]) -> None:
    read = {one.file for one in found if one.equal}
    assert {"J2K_pixelrep_mismatch.dcm", "GDCMJ2K_TextGBR.dcm", "examples_palette.dcm", "MR_small_bigendian.dcm"} <= read


def test_the_page_holds_the_table(found: list[Outcome]) -> None:
    written = PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0].strip()
    assert written == table(found).strip(), "stale; run python -m tests.data.public_files"


def test_the_remedy_for_a_format_that_is_not_read_ends_the_complaint(tmp_path: Path) -> None:
    values = np.arange(24, dtype=np.int16).reshape(2, 3, 4)
    nibabel.save(nibabel.MGHImage(values, np.eye(4)), tmp_path / "a.mgz")
    with pytest.raises(DataError, match=r"convert it to NIfTI: nibabel\.save\(nibabel\.load\(FILE\), 'NAME\.nii\.gz'\)"):
        slides.read_whole(tmp_path / "a.mgz")
    nibabel.save(nibabel.load(tmp_path / "a.mgz"), tmp_path / "a.nii.gz")
    assert np.array_equal(volumes.voxels(tmp_path / "a.nii.gz"), values)


@pytest.mark.parametrize("name", ["a.png", "a.MNC", "a.img.gz", "a.tck", "a"])
def test_a_file_of_another_kind_is_one_plain_line(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"no picture")
    with pytest.raises(DataError, match="image cannot be read") as raised:
        slides.read_whole(tmp_path / name)
    assert not PYTHONS.search(str(raised.value).replace(str(tmp_path), ""))
    Image.new("L", (4, 4)).save(tmp_path / name, "PNG")
    assert slides.read_whole(tmp_path / name).shape == (4, 4)
