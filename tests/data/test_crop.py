"""One fixed part of every picture: where it lies, what is left of small ones, and what is scored."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import ValidationError

from consilium.client.site_data import load_site_data, with_cropped_pictures
from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.data.datalist import SPLITS, Crop, DataList, Item, read_datalist
from consilium.data.disk_cache import open_disk_cache
from consilium.data.images import read_masks, read_picture, read_sample
from consilium.data.planes_and_tiles import expand
from consilium.data.settings import PictureSettings
from consilium.tasks.segmentation import SegmentationConfig
from consilium.tasks.segmentation.task import SegmentationTask
from consilium.tasks.segmentation.unit_scores import spacing_of
from tests.conftest import refused, small_cells
from tests.tasks.scoring import Bright, picture, volume

SPOT = {"spot": [1]}


def saved(folder: Path, image: np.ndarray, mask: np.ndarray | None = None) -> Item:
    Image.fromarray(image).save(folder / "i.png")
    Image.fromarray(np.zeros(image.shape[:2], np.uint8) if mask is None else mask).save(folder / "m.png")
    return Item(folder / "i.png", folder / "m.png")


def test_a_crop_s_places_are_the_ones_there_are() -> None:
    """5 rows, 3 wanted: rows 0, 1 or 2 may come first; shares just under 1 take the last place and no more."""
    rows = np.arange(5 * 9).reshape(5, 9)
    last = 1 - 2**-32
    assert np.array_equal(Crop(3, 0.0, 0.0).cut(rows), rows[:3, :3])
    assert np.array_equal(Crop(3, 0.34, 0.5).cut(rows), rows[1:4, 3:6])
    assert np.array_equal(Crop(3, last, last).cut(rows), rows[2:, 6:])


@pytest.mark.parametrize(
    ("shape", "left"), [((16, 16), (16, 16)), ((15, 40), (15, 16)), ((33, 17), (16, 16)), ((1, 1), (1, 1))]
)
def test_a_side_that_is_shorter_stays_whole(shape: tuple[int, int], left: tuple[int, int]) -> None:
    crop = Crop(16, 0.999, 0.999)
    assert crop.cut(np.zeros((*shape, 3))).shape[:2] == crop.shape(*shape) == left


def test_image_and_mask_are_cut_at_one_place(tmp_path: Path) -> None:
    """The picture shows its own mask, so they must agree after the cut too; at the crop's size nothing is resampled."""
    mask = (np.random.default_rng(0).random((53, 71)) > 0.5).astype(np.uint8)
    item = replace(saved(tmp_path, mask * 255, mask), crop=Crop(32, 0.7, 0.2))
    sample = read_sample(item, SPOT, 32)
    assert torch.equal(sample["image"][0] / 255, sample["label"][0])
    assert torch.equal(sample["label"][0].byte(), torch.from_numpy(mask[15:47, 8:40]))  # .7 of 22 places, .2 of 40
    assert np.array_equal(read_masks(item, SPOT)[0], mask[15:47, 8:40] > 0)
    assert torch.equal(read_picture(item, 32), sample["image"])


def test_grey_levels_of_16_bits_are_the_whole_picture_s(tmp_path: Path) -> None:
    """A bright corner outside the crop sets the window: what is seen of the rest stays dark."""
    image = np.full((64, 64), 100, np.uint16)
    image[:20, :20], image[40:, 40:] = 60_000, 200
    item = saved(tmp_path, image, np.zeros((64, 64), np.uint8))
    seen = read_picture(replace(item, crop=Crop(16, 0.999, 0.999)), 16)
    assert seen.max() < 2
    assert read_picture(item, 64).max() == 255


def test_what_is_checked_is_the_whole_picture(tmp_path: Path) -> None:
    """A crop that misses the fault must not let it pass: the next seed's would meet it."""
    mask = np.zeros((40, 40), np.uint8)
    mask[0, 0] = 7
    item = replace(saved(tmp_path, np.zeros((40, 40), np.uint8), mask), crop=Crop(16, 0.999, 0.999))
    refused("label value 7", read_sample, item, SPOT, 16)
    Image.fromarray(np.zeros((41, 40), np.uint8)).save(tmp_path / "m.png")
    refused("mask is", read_sample, item, SPOT, 16)


def test_training_parts_follow_the_seed_and_scored_ones_do_not() -> None:
    data = DataList(Path("d.json"), {split: tuple(Item(Path(f"{n}.png"), None) for n in range(6)) for split in SPLITS})
    one, again, other = (with_cropped_pictures(data, 32, seed) for seed in (1, 1, 2))
    assert one == again
    assert one.splits["test"] == other.splits["test"]
    assert one.splits["validation"] == other.splits["validation"]
    assert not {i.crop for i in one.splits["training"]} & {i.crop for i in other.splits["training"]}
    assert len({i.crop for i in one.splits["training"]}) == 6
    assert with_cropped_pictures(data, None, 1) is data


def test_the_same_name_in_another_folder_is_cut_alike_and_planes_of_a_volume_too() -> None:
    items = [Item(Path("a/v.nii"), None, n) for n in (0, 1)] + [Item(Path("b/v.nii"), None, 5)]
    tiles = [Item(Path("a/p.tif"), None, tile=(x, 0, 64, 64)) for x in (0, 64)]
    data = with_cropped_pictures(DataList(Path("d"), {"training": (*items, *tiles), "validation": (), "test": ()}), 16, 0)
    planes, parts = data.splits["training"][:3], data.splits["training"][3:]
    assert len({item.crop for item in planes}) == 1
    assert len({item.crop for item in parts}) == 2


def test_tiles_and_a_crop_are_refused_together() -> None:
    with pytest.raises(ValidationError, match="crop: takes one part of a picture, and tiles"):
        PictureSettings.model_validate({"crop": 64, "tiles": {"size": 64}})
    for wrong in (0, 15, 9000, "all", 32.5):
        with pytest.raises(ValidationError):
            PictureSettings.model_validate({"crop": wrong})


def test_a_job_s_crop_reaches_its_sites(tmp_path: Path) -> None:
    raw = small_cells("fedit").model_dump()
    config = JobConfig.model_validate(raw | {"task": raw["task"] | {"crop": 32}})
    found = load_site_data(config, "site-1", SiteConfig(), tmp_path).splits
    assert {item.crop.side for items in found.values() for item in items} == {32}


def scored(folder: Path, entries: list[dict], crop: Crop, side: int = 8, **settings: object) -> SegmentationTask:
    (folder / "d.json").write_text(json.dumps({"training": entries, "test": entries}))
    config = SegmentationConfig.model_validate({"classes": SPOT, "augment": False} | settings)
    data = expand(read_datalist(folder / "d.json"), config)
    splits = {split: tuple(replace(item, crop=crop) for item in items) for split, items in data.splits.items()}
    data = replace(data, splits=splits)
    return SegmentationTask(data, config.classes, side, config.prompt, config.augment, config, config.scores)


def area(rows: int, columns: int, *place: int) -> np.ndarray:
    mask = np.zeros((rows, columns), bool)
    mask[place[0] : place[1], place[2] : place[3]] = True
    return mask


@pytest.mark.parametrize("resize", ["stretch", "pad"])
@pytest.mark.parametrize("grid", ["resized", "original"])
def test_scores_are_of_the_crop_alone(grid: str, resize: str, tmp_path: Path) -> None:
    """40 x 24 at side 16, last place: rows 24 to 40, columns 8 to 24. There 8 x 16 is true and 8 x 8 of it is found."""
    guess, reference = area(40, 24, 0, 32, 0, 16), area(40, 24, 24, 32, 0, 24)
    task = scored(
        tmp_path, [picture(tmp_path, "p", guess, reference)], Crop(16, 0.999, 0.999), 16, scores={"grid": grid}, resize=resize
    )
    assert task.evaluate(Bright(), "test", 1)["dice"] == pytest.approx(2 * 64 / (64 + 128))


def test_a_short_side_is_padded_and_its_padding_not_scored(tmp_path: Path) -> None:
    """10 x 40 at side 20 is 10 x 20: at 20 pixels a side its lower half is padding."""
    entry = picture(tmp_path, "p", np.ones((10, 40), bool), area(10, 40, 0, 10, 30, 40))
    task = scored(tmp_path, [entry], Crop(20, 0.5, 0.999), 20, resize="pad")
    assert task._size_without_padding(task.data.splits["test"][0]) == (10, 20)
    assert task.evaluate(Bright(), "test", 1)["dice"] == pytest.approx(2 * 100 / (100 + 200))


def test_boxes_stand_around_what_the_crop_shows(tmp_path: Path) -> None:
    entry = picture(tmp_path, "p", area(40, 40, 0, 1, 0, 1), area(40, 40, 20, 38, 22, 36))
    task = scored(tmp_path, [entry], Crop(16, 0.999, 0.999), 16, prompt="box")
    sample = task._add_prompt(task._samples("test", 0))
    assert sample["prompt"].tolist() == [[0, 0, 11, 13]]  # columns 24 to 36, rows 24 to 38, from the corner (24, 24)
    outside = scored(tmp_path, [entry], Crop(16, 0.0, 0.0), 16, prompt="box")
    assert outside._add_prompt(outside._samples("test", 0))["prompt"].isnan().all()
    assert "dice" not in outside.evaluate(_Boxed(), "test", 1)  # an empty reference is not scored


class _Boxed(Bright):
    def forward(self, images: torch.Tensor, boxes: torch.Tensor | None = None) -> torch.Tensor:
        assert boxes is not None
        return super().forward(images)


def test_unequal_pixels_keep_their_millimetres(tmp_path: Path) -> None:
    """Rows of 2 and columns of 0.5 mm: 8 pixels a side brought to 4 are 4 by 1 mm, whatever the whole plane's size was."""
    voxels = np.zeros((30, 21, 3), bool)
    entry = volume(tmp_path, "v", voxels, voxels, np.diag([0.5, 2.0, 3.0, 1.0]))
    task = scored(tmp_path, [entry], Crop(8, 0.3, 0.6), 8)
    item = task.data.splits["test"][0]
    assert spacing_of(item, (4, 4)) == (3.0, 4.0, 1.0)
    assert spacing_of(item, (8, 8)) == (3.0, 2.0, 0.5)


@pytest.mark.parametrize("grid", ["resized", "original"])
def test_a_volume_s_distances_are_of_its_crop(grid: str, tmp_path: Path) -> None:
    """Two single voxels, 3 columns of 0.5 mm and 2 planes of 3 mm apart; a third, outside the crop, would be far off."""
    guess, reference = (np.zeros((30, 20, 5), bool) for _ in range(2))
    guess[2, 3, 1] = reference[5, 3, 3] = True  # seen from the right and from the front: low i and j are right and low
    guess[29, 19, 0] = True
    entry = volume(tmp_path, "v", guess, reference, np.diag([0.5, 2.0, 3.0, 1.0]))
    task = scored(tmp_path, [entry], Crop(8, 0.999, 0.999), 8, scores={"per": "volume", "grid": grid})
    found = task.evaluate(Bright(), "test", 2, full=True)
    assert found["hd95_mm"] == pytest.approx(np.hypot(1.5, 6.0))


def test_cropped_samples_have_names_of_their_own_in_the_store(tmp_path: Path) -> None:
    item = saved(tmp_path, np.zeros((40, 40), np.uint8))
    store = open_disk_cache(tmp_path / "kept", 10**6)
    assert store is not None
    crops = (None, Crop(16, 0, 0), Crop(16, 0.5, 0), Crop(17, 0, 0))
    assert len({store.name(replace(item, crop=crop), "s") for crop in crops}) == 4
