"""The same batches whatever reads them: threads, disk, memory, a cache that breaks; bad samples refused or left out."""

import json
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch
from PIL import Image

from consilium.core.errors import DataError
from consilium.data import disk_cache as cache_folder, disk_cache as fingerprint, images, nifti, volumes
from consilium.data.cache import prefetch
from consilium.data.check_samples import check_and_find_vanished, without_bad_samples
from consilium.data.datalist import DataList, Loading, read_datalist
from consilium.data.disk_cache import DiskCache
from consilium.data.planes_and_tiles import expand
from consilium.tasks.classification.task import ClassificationTask
from consilium.tasks.segmentation.task import SegmentationTask
from tests.conftest import Patch, refused
from tests.data.storing import CLASSES, break_pixels, made

SIDE = 37


def task(data: DataList, **loading: object) -> SegmentationTask:
    return SegmentationTask(replace(data, loading=Loading(**loading)), CLASSES, SIDE, prompt="box")


def bits(made: SegmentationTask | ClassificationTask) -> list[bytes]:
    """Return all batches of two epochs, byte by byte."""
    orders = ([4, 1, 3], [0, 2], [1, 0, 2, 4], [3])
    batches = [made.batch(order, seed) for seed in (1, 2) for order in orders]
    return [batch[key].numpy().tobytes() for batch in batches for key in sorted(batch)]


@pytest.mark.parametrize(("workers", "disk"), [(0, True), (4, True), (4, False)])
def test_batches_are_the_same_bit_for_bit(workers: int, disk: bool, tmp_path: Path) -> None:
    data = made(tmp_path / "site")
    expected = bits(task(data))
    place = {"folder": tmp_path / "state", "most": 10**9} if disk else {}
    first = task(data, workers=workers, **place)
    assert bits(first) == expected
    assert bits(task(data, workers=workers, **place)) == expected
    assert bits(first) == expected
    assert (tmp_path / "state").exists() == disk


def corrupt(folder: Path) -> None:
    for path in folder.glob("*.sample"):
        path.write_bytes(path.read_bytes()[:-9] + b"corrupted")


@pytest.mark.parametrize("harm", [corrupt, shutil.rmtree, lambda f: (f / "salt").unlink()])
def test_a_cache_harmed_in_the_middle_changes_nothing(harm: Callable[[Path], object], tmp_path: Path) -> None:
    data = made(tmp_path / "site")
    expected, place = bits(task(data)), {"folder": tmp_path / "state", "most": 10**9, "workers": 2}
    running = task(data, **place)
    assert bits(running) == expected
    harm(tmp_path / "state" / cache_folder.FOLDER)
    assert bits(running) == expected
    assert bits(task(data, **place)) == expected


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    data = made(tmp_path / "site")
    place = {"folder": tmp_path / "state", "most": 10**9}
    before = bits(task(data, **place))
    item = data.splits["training"][0]
    Image.fromarray(np.full((40, 40, 3), 9, np.uint8)).save(item.image)
    after = bits(task(data, **place))
    assert after != before
    assert after == bits(task(data))


def test_a_warm_cache_decodes_nothing(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(fingerprint, "RECENT", -1.0)
    data = made(tmp_path / "site")
    place = {"folder": tmp_path / "state", "most": 10**9}
    expected = bits(task(data, **place))

    def never(*_: object) -> None:
        raise AssertionError("decoded again")

    for name in ("read", "labels"):
        monkeypatch.setattr(images.pictures, name, never)
    assert bits(task(data, **place)) == expected


def test_without_room_on_disk_memory_serves(tmp_path: Path, monkeypatch: Patch) -> None:
    data = made(tmp_path / "site")
    running = task(data, folder=tmp_path / "state", most=1)
    expected = bits(running)
    assert list((tmp_path / "state" / cache_folder.FOLDER).glob("*.sample")) == []
    monkeypatch.setattr(images.pictures, "read", None)
    assert bits(running) == expected


# prefetch -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 3])
def test_prefetch_keeps_the_order_and_raises_in_place(count: int) -> None:
    def call(n: int) -> int:
        if n == 4:
            raise DataError("the fourth")
        return n

    found = []
    running = prefetch((lambda n=n: call(n) for n in range(9)), count)
    refused("the fourth", found.extend, (n for n in running))
    assert found == [0, 1, 2, 3]


def test_prefetch_makes_a_few_only_and_ends_its_thread_when_it_is_closed() -> None:
    begun: list[int] = []
    running = prefetch((lambda n=n: begun.append(n) for n in range(100)), 2)
    before = set(threading.enumerate())  # those of other tests may end meanwhile
    next(running)
    running.close()
    assert len(begun) <= 3
    assert set(threading.enumerate()) <= before


# volumes --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def planes(tmp_path: Path) -> DataList:
    """Three compressed volumes of six planes each."""
    state, entries = np.random.RandomState(1), []
    for name in "abc":
        values = state.randint(0, 255, (20, 24, 6)).astype(np.uint8)
        for kind, array in (("i", values), ("m", (values > 128).astype(np.uint8) * 2)):
            nibabel.save(nibabel.Nifti1Image(array, np.diag([1, 1, 2, 1])), tmp_path / f"{name}{kind}.nii.gz")
        entries.append({"image": f"{name}i.nii.gz", "label": f"{name}m.nii.gz"})
    (tmp_path / "d.json").write_text(json.dumps({"training": entries}))
    volumes.drop_caches()
    return expand(read_datalist(tmp_path / "d.json"))


@pytest.mark.parametrize("workers", [0, 4])
def test_a_volume_is_unpacked_once_whatever_the_order(
    workers: int, planes: DataList, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(fingerprint, "RECENT", -1.0)  # else a sample's name changes two seconds after the files were written
    order = np.random.RandomState(0).permutation(18).tolist()
    expected = task(planes).batch(order, 3)
    volumes.drop_caches()
    unpacked: list[str] = []
    real = nifti.voxels
    monkeypatch.setattr(nifti, "voxels", lambda path: unpacked.append(path.name) or real(path))
    made = task(planes, folder=tmp_path / "state", most=10**9, workers=workers)
    assert sorted(unpacked) == ["am.nii.gz", "bm.nii.gz", "cm.nii.gz"]  # a look at the labels
    unpacked.clear()
    volumes.drop_caches()
    found = made.batch(order, 3)
    assert all(torch.equal(found[key].nan_to_num(), expected[key].nan_to_num()) for key in expected)
    assert sorted(unpacked) == sorted(f"{name}{kind}.nii.gz" for name in "abc" for kind in "im")


def test_no_more_volumes_are_held_than_said(planes: DataList, monkeypatch: Patch) -> None:
    inside, most, real = [0], [0], SegmentationTask  # how many threads go through a volume at a time
    read = images.read_image

    def counted(item: object, *rest: object) -> np.ndarray:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        try:
            return read(item, *rest)
        finally:
            inside[0] -= 1

    monkeypatch.setattr(images, "read_image", counted)
    made = real(replace(planes, loading=Loading(workers=8)), CLASSES, SIDE)
    made.batch(range(18), 0)
    assert 1 <= most[0] <= volumes.KEPT


# bad samples ----------------------------------------------------------------------------------------------------------


def look(item: object) -> None:
    check_and_find_vanished(item, CLASSES)


def test_a_look_finds_all_but_bad_pixels_and_names_the_file(tmp_path: Path) -> None:
    data = made(tmp_path, training=6)
    items = data.splits["training"]
    items[1].image.write_bytes(b"no picture")
    Image.fromarray(np.zeros((9, 9), np.uint8)).save(items[2].label)
    Image.fromarray(np.full((40, 40), 77, np.uint8)).save(items[3].label)
    break_pixels(items[4].image)
    found = without_bad_samples(data, look, "", None)
    assert [item.image for item in found.splits["training"]] == [items[n].image for n in (0, 4, 5)]
    assert found.skipped == 3
    refused(r"Muster_Erika_training_1\.png: image cannot be read", task, data)
    refused(r"Muster_Erika_training_1\.png: image cannot be read", task, data, workers=4)


def test_what_passed_is_not_looked_at_again_until_it_changes(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(fingerprint, "RECENT", -1.0)
    data, looked = made(tmp_path / "site"), []
    for _ in range(2):
        store = DiskCache(tmp_path / cache_folder.FOLDER, 10**4)
        without_bad_samples(data, lambda item: looked.append(item.name) or look(item), "", store)
    assert len(looked) == 7
    data.splits["training"][2].label.write_bytes(b"no mask")
    assert without_bad_samples(data, look, "", store).skipped == 1
    assert len(without_bad_samples(data, look, "", store).splits["training"]) == 4
    without_bad_samples(data, lambda item: looked.append(item.name), "another job", store)
    assert len(looked) == 14


@pytest.mark.parametrize("workers", [0, 4])
def test_bad_pixels_refuse_in_one_line_or_leave_the_sample_out(workers: int, tmp_path: Path) -> None:
    data = made(tmp_path / "site")
    whole = task(data).batch([0, 2, 3], 5)
    for index in (1, 4):
        break_pixels(data.splits["training"][index].image)
    with pytest.raises(DataError, match=r"Muster_Erika_training_1.png: image cannot be read") as error:
        task(data, workers=workers).batch([0, 1, 2, 3, 4], 5)
    assert "\n" not in str(error.value)
    skipping = task(data, workers=workers, skip=True)
    for _ in range(2):
        found = skipping.batch([0, 1, 2, 3, 4], 5)
        assert all(torch.equal(found[key], whole[key]) for key in whole)
    assert skipping.batch([4, 1], 5) == {}
    assert skipping.skipped == 2
