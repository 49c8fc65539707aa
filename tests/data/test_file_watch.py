"""Files that are gone, cannot be opened or have changed since their samples were read."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from consilium.core.errors import DataError, UnfitError
from consilium.data import volumes
from consilium.data.check_samples import FileWatch
from consilium.data.datalist import DataList, read_datalist
from consilium.data.safe_open import stamp, volume_format
from tests.conftest import refused
from tests.data import dicoms

BOTH = ("training", "validation")
Place = tuple[str, int]


def listed(folder: Path, content: object, *files: str) -> DataList:
    for name in files:
        (folder / name).write_text("as it was")
    (folder / "datalist.json").write_text(json.dumps(content))
    return read_datalist(folder / "datalist.json")


def pairs(folder: Path) -> DataList:
    """Two pictures of one file with two masks, and one to validate on; nobody watches the test picture."""
    entries = [{"image": "a.png", "label": "m.png"}, {"image": "a.png", "label": "n.png"}]
    lists = {"training": entries, "validation": ["b.png"], "test": ["c.png"]}
    return listed(folder, lists, "a.png", "m.png", "n.png", "b.png", "c.png")


def reader(*bad: Place, error: type[DataError] = DataError) -> tuple[list[Place], Callable[[str, int], None]]:
    """Return what was read again, and what reads it, but for what is bad."""
    done: list[Place] = []

    def read(split: str, index: int) -> None:
        done.append((split, index))
        if (split, index) in bad:
            raise error(f"{split} {index}: cannot be decoded")

    return done, read


def test_files_that_are_gone(tmp_path: Path) -> None:
    """Where bad samples are skipped they are left out, and without a training sample there is nothing to train on."""
    data = pairs(tmp_path)
    strict, skips = FileWatch(data, BOTH, skip=False), FileWatch(data, BOTH, skip=True)
    done, read = reader()
    (tmp_path / "c.png").unlink()
    strict.check_still_readable(read)
    skips.check_still_readable(read)
    (tmp_path / "b.png").unlink()
    (tmp_path / "m.png").unlink()
    refused(r"m\.png: cannot be read \(No such file", strict.check_still_readable, read)
    skips.check_still_readable(read)
    (tmp_path / "n.png").unlink()  # the pictures are there
    refused(r"n\.png: cannot be read", skips.check_still_readable, read)
    assert not done
    nothing = listed(tmp_path, {"training": []})
    for skip in (False, True):
        FileWatch(nothing, BOTH, skip).check_still_readable(read)


def test_what_has_changed_is_read_again_once(tmp_path: Path) -> None:
    watch = FileWatch(pairs(tmp_path), BOTH, skip=False)
    (tmp_path / "m.png").write_text("another mask")
    (tmp_path / "b.png").write_text("other")
    done, read = reader()
    for _ in range(2):
        watch.check_still_readable(read)
    assert done == [("training", 0), ("validation", 0)]


def test_what_has_changed_and_cannot_be_read_says_so_until_it_can(tmp_path: Path) -> None:
    data = pairs(tmp_path)
    strict, skips = FileWatch(data, BOTH, skip=False), FileWatch(data, BOTH, skip=True)
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_text("trunc")
    _, read = reader(("training", 1))
    for _ in range(2):
        refused("training 1: cannot be decoded", strict.check_still_readable, read)
        skips.check_still_readable(read)
    _, read = reader(("training", 0), ("training", 1))
    for _ in range(2):
        refused("cannot be decoded", skips.check_still_readable, read)
    strict.check_still_readable(reader()[1])
    (tmp_path / "b.png").write_text("once more")
    done, read = reader(("validation", 0), error=UnfitError)
    strict.check_still_readable(read)  # that it does not fit the job is not a reason to stop
    assert done == [("validation", 0)]


@pytest.mark.parametrize("skip", [False, True])
def test_a_file_that_is_there_and_cannot_be_opened_or_read(skip: bool, tmp_path: Path) -> None:
    """A share whose permission was withdrawn, a disk with bad blocks: the look at sizes passed."""
    watch, opened = FileWatch(pairs(tmp_path), BOTH, skip), Path.open
    for number in (5, 13):

        def fails(path: Path, *how: str, number: int = number) -> object:
            if path.name == "a.png":
                raise OSError(number, os.strerror(number))
            return opened(path, *how)

        with patch.object(Path, "open", fails), pytest.raises(DataError, match=os.strerror(number)):
            watch.check_still_readable(reader()[1])


@pytest.mark.parametrize("how", ["emptied", "away", "shorter"])
def test_a_folder_of_dicom_files_is_what_was_in_it(how: str, tmp_path: Path) -> None:
    """An emptied folder, or one of links whose share went away, was still a volume, and each round was charged."""
    series, share = tmp_path / "series", tmp_path / "share"
    dicoms.stack(series, np.zeros((3, 8, 8), np.int16))
    share.mkdir()
    for file in sorted(series.iterdir()):
        (share / file.name).write_bytes(file.read_bytes())
        file.unlink()
        file.symlink_to(share / file.name)
    data = listed(tmp_path, {"training": [{"image": "series", "label": 0}]})
    watch = FileWatch(data, BOTH, skip=False)

    def read(split: str, index: int) -> object:
        return volumes.voxels(data.splits[split][index].image)

    watch.check_still_readable(read)
    if how == "away":
        share.rename(tmp_path / "away")
    for file in sorted(series.iterdir())[how == "shorter" :] if how != "away" else ():
        file.unlink()
    for _ in range(2):
        if how == "shorter":  # a plane alone is still a volume: what was read is what counts
            watch.check_still_readable(read)
        else:
            refused(r"series: (holds no DICOM image|is not a volume)", watch.check_still_readable, read)


def test_a_folder_that_was_empty_is_a_volume_when_its_share_is_back(tmp_path: Path) -> None:
    """That it was none was remembered by its path for as long as the process lived."""
    (tmp_path / "series").mkdir()
    assert not volumes.is_volume(tmp_path / "series")
    assert volume_format(tmp_path / "a.dcm") is None
    (tmp_path / "a.dcm").write_bytes(b"x")
    assert volume_format(tmp_path / "a.dcm") == "dicom"
    dicoms.stack(tmp_path / "made", np.zeros((3, 8, 8), np.int16))
    shutil.copytree(tmp_path / "made", tmp_path / "series", dirs_exist_ok=True)
    assert volumes.is_volume(tmp_path / "series")


@pytest.mark.parametrize("target", ["nowhere", "b"])
def test_a_change_beside_a_broken_link_is_seen(target: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    (tmp_path / "b").symlink_to(target)
    before = stamp(tmp_path)
    (tmp_path / "a").write_text("xy")
    assert stamp(tmp_path) != before
