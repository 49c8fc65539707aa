"""Slides and large pictures: every tile is what PIL and the array that was written say, and memory stays small."""

import json
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import tifffile
from PIL import Image

from consilium.core.errors import DataError
from consilium.data import slides
from consilium.data.check import check_datalist
from consilium.data.datalist import Item, read_datalist
from consilium.data.images import read_image, read_labels, read_sample
from consilium.data.planes_and_tiles import expand
from consilium.data.settings import PictureSettings, TilesConfig
from tests.conftest import Patch, refused

ROWS, COLUMNS = 250, 330
TILES = [(0, 0, 64, 64), (266, 186, 64, 64), (60, 50, 100, 90), (0, 0, COLUMNS, ROWS), (329, 249, 1, 1), (16, 16, 16, 16)]
COMPRESSIONS = [None, "zlib", "zstd"]


def array(shape: tuple[int, ...] = (ROWS, COLUMNS, 3), dtype: Any = np.uint8) -> np.ndarray:
    return np.random.default_rng(0).integers(0, np.iinfo(dtype).max, shape).astype(dtype)


def cut(values: np.ndarray, tile: tuple[int, int, int, int]) -> np.ndarray:
    x, y, width, height = tile
    return values[y : y + height, x : x + width]


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize(
    "layout", [{"tile": (32, 48)}, {"rowsperstrip": 7}, {"tile": (512, 512)}], ids=["tiles", "strips", "one tile"]
)
def test_a_tile_is_what_was_written(layout: dict[str, Any], compression: str | None, tmp_path: Path) -> None:
    values = array()
    tifffile.imwrite(tmp_path / "a.tif", values, compression=compression, photometric="rgb", **layout)
    for tile in TILES:
        assert np.array_equal(slides.read(tmp_path / "a.tif", tile), cut(values, tile))


@pytest.mark.parametrize("predictor", [False, True])
@pytest.mark.parametrize(("bigtiff", "byteorder"), [(False, "<"), (False, ">"), (True, "<")])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_grey_of_8_and_16_bits_in_every_order(
    dtype: Any, byteorder: Any, bigtiff: bool, predictor: bool, tmp_path: Path
) -> None:
    values = array((ROWS, COLUMNS), dtype)
    tifffile.imwrite(
        tmp_path / "a.tif", values, tile=(64, 64), byteorder=byteorder, bigtiff=bigtiff, compression="zlib", predictor=predictor
    )
    for tile in TILES:
        assert np.array_equal(slides.read(tmp_path / "a.tif", tile), cut(values, tile))


@pytest.mark.parametrize("save", [{"compression": "raw"}, {"compression": "tiff_lzw"}, {"compression": "tiff_adobe_deflate"}])
@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "1", "P"])
def test_what_pil_wrote_is_what_pil_reads(mode: str, save: dict[str, str], tmp_path: Path) -> None:
    Image.fromarray(array()).convert(mode).save(tmp_path / "a.tif", **save)
    whole = read_image(tmp_path / "a.tif")
    for tile in TILES:
        assert np.array_equal(read_image(Item(tmp_path / "a.tif", None, tile=tile)), cut(whole, tile))


@pytest.mark.parametrize("name", ["a.png", "a.bmp"])
def test_pictures_without_places_are_read_whole_and_cut(name: str, tmp_path: Path) -> None:
    Image.fromarray(array()).save(tmp_path / name)
    for tile in TILES:
        assert np.array_equal(slides.read(tmp_path / name, tile), cut(array(), tile))


def svs(path: Path, values: np.ndarray) -> None:
    """Write a slide as Aperio's scanners do: JPEG tiles, a thumbnail in strips, a smaller level."""
    text = f"Aperio Image Library v1\r\n{values.shape[1]}x{values.shape[0]} (64x64) JPEG/RGB Q=90|AppMag = 20|MPP = 0.5"
    with tifffile.TiffWriter(path) as file:
        for number, (one, options) in enumerate(
            [(values, {"tile": (64, 64)}), (values[::4, ::4], {}), (values[::2, ::2], {"tile": (64, 64)})]
        ):
            more = {"subfiletype": 0, "metadata": None, "description": text if number == 0 else f"{text} level {number}"}
            file.write(one, photometric="rgb", compression="jpeg", compressionargs={"level": 95}, **options, **more)


def smooth() -> np.ndarray:
    small = Image.fromarray(np.random.default_rng(3).integers(0, 256, (6, 8, 3), np.uint8))
    return np.asarray(small.resize((512, 384), Image.Resampling.BICUBIC))


def test_a_slide_of_a_scanner_by_its_levels(tmp_path: Path) -> None:
    svs(tmp_path / "a.svs", smooth())
    found = slides.layout(tmp_path / "a.svs")
    assert (found.kind, found.levels) == ("aperio", ((384, 512), (192, 256)))
    tile = (100, 50, 128, 96)
    assert np.abs(slides.read(tmp_path / "a.svs", tile).astype(int) - cut(smooth(), tile)).mean() < 3
    half = (20, 30, 64, 64)
    assert np.abs(slides.read(tmp_path / "a.svs", half, 1).astype(int) - cut(smooth()[::2, ::2], half)).mean() < 3
    refused(r"a\.svs: is a whole slide; set task\.tiles", read_image, tmp_path / "a.svs")
    refused(r"has 2 levels, the first is 0; set task\.tiles\.level lower", slides.read, tmp_path / "a.svs", tile, 2)


def test_a_slide_without_the_extra_is_one_clear_line(tmp_path: Path, monkeypatch: Patch) -> None:
    svs(tmp_path / "a.svs", smooth())
    tifffile.imwrite(tmp_path / "a.tif", array(), tile=(64, 64))
    monkeypatch.setitem(sys.modules, "openslide", None)
    slides.layout.cache_clear()
    refused(r"a\.svs: is a whole slide; install consilium-flare\[slides\] to read it$", slides.layout, tmp_path / "a.svs")
    assert np.array_equal(slides.read(tmp_path / "a.tif", TILES[0]), cut(array(), TILES[0]))
    slides.layout.cache_clear()


def test_tiles_cover_every_pixel_and_lie_within() -> None:
    """Worked out by hand: 40 columns by 16 rows, tiles of 16 with steps of 12: columns 0, 12, 24."""
    assert slides.tiles((16, 40), TilesConfig(size=16, stride=12)) == [(0, 0, 16, 16), (12, 0, 16, 16), (24, 0, 16, 16)]
    assert slides.tiles((16, 36), TilesConfig(size=16)) == [(0, 0, 16, 16), (16, 0, 16, 16), (20, 0, 16, 16)]
    assert slides.tiles((12, 8), TilesConfig(size=16)) == [(0, 0, 8, 12)]
    seen = np.zeros((97, 203), int)
    for x, y, width, height in slides.tiles((97, 203), TilesConfig(size=32)):
        seen[y : y + height, x : x + width] += 1
        assert (width, height) == (32, 32)
    assert seen.min() == 1
    with pytest.raises(ValueError, match="stride: 40 is over size 32, and the pixels between tiles would be left out"):
        TilesConfig(size=32, stride=40)


def listed(folder: Path, mask: np.ndarray, **entry: Any) -> Path:
    tifffile.imwrite(folder / "a.tif", array(), tile=(64, 64))
    tifffile.imwrite(folder / "m.tif", mask, tile=(64, 64))
    path = folder / "datalist.json"
    one = {"image": "a.tif", "label": "m.tif", **entry}
    path.write_text(json.dumps({"training": [one], "test": [one]}))
    return path


def labelled() -> np.ndarray:
    mask = np.zeros((ROWS, COLUMNS), np.uint8)
    mask[10:20, 10:20] = 1
    mask[240:, 320:] = 2
    return mask


def test_a_list_comes_apart_into_tiles_of_image_and_mask(tmp_path: Path) -> None:
    path = listed(tmp_path, labelled())
    settings = PictureSettings(tiles=TilesConfig(size=128))
    found = expand(read_datalist(path), settings).splits
    corners = [(x, y, 128, 128) for y in (0, 122) for x in (0, 128, 202)]
    assert [item.tile for item in found["training"]] == [item.tile for item in found["test"]] == corners
    for item in found["training"]:
        assert np.array_equal(read_image(item, settings), cut(array(), item.tile))
        assert np.array_equal(read_labels(item, settings).values, cut(labelled(), item.tile))
    sample = read_sample(found["training"][5], {"a": [1], "b": [2]}, 128, settings)
    assert (float(sample["label"][0].sum()), float(sample["label"][1].sum())) == (0, 100)
    thin = expand(read_datalist(path), PictureSettings(tiles=TilesConfig(size=128, empty="drop"))).splits
    assert [item.tile for item in thin["training"]] == [corners[0], corners[5]]
    assert len(thin["test"]) == 6
    assert len({item.study for item in found["training"]}) == 1
    assert [len(expand(read_datalist(path)).splits[split]) for split in ("training", "test")] == [1, 1]


def test_a_tile_of_a_value_without_class_is_not_empty(tmp_path: Path) -> None:
    data = read_datalist(listed(tmp_path, labelled()))
    mapped = replace(data.splits["training"][0], label_map=((1, ("a",)), (2, ())))
    found = expand(replace(data, splits={"training": (mapped,)}), PictureSettings(tiles=TilesConfig(size=128, empty="drop")))
    assert [item.tile for item in found.splits["training"]] == [(0, 0, 128, 128), (202, 122, 128, 128)]


def test_a_tile_in_the_list_is_one_sample(tmp_path: Path) -> None:
    (item,) = expand(read_datalist(listed(tmp_path, labelled(), tile=[8, 8, 16, 16]))).splits["test"]
    assert item.name == "a.tif[8,8]"
    assert np.array_equal(read_image(item), cut(array(), (8, 8, 16, 16)))
    assert read_labels(item).present() == {0, 1}


@pytest.mark.parametrize("tile", [[0, 0, 0, 4], [0, 0, 4], "a", [0, 0, 4.0, 4], [-1, 0, 4, 4], [True, 0, 4, 4], {}])
def test_a_tile_that_is_no_place_is_refused(tile: Any, tmp_path: Path) -> None:
    refused(r'training\[0\]: tile .* is not a place; write "tile"', read_datalist, listed(tmp_path, labelled(), tile=tile))


def test_what_cannot_be_read_by_tiles_is_refused_in_a_line(tmp_path: Path) -> None:
    path = listed(tmp_path, labelled())
    refused(r"tile \[300, 0, 64, 64\] is outside its 330x250 pixels", slides.read, tmp_path / "a.tif", (300, 0, 64, 64))
    tifffile.imwrite(tmp_path / "m.tif", labelled()[:, :-1], tile=(64, 64))
    item = expand(read_datalist(path), PictureSettings(tiles=TilesConfig(size=128))).splits["test"][0]
    refused(r"m\.tif: mask is 329x250 pixels \(width x height\), its image 330x250; make them equal", read_labels, item)
    tifffile.imwrite(tmp_path / "p.tif", np.stack([array((64, 64)), array((64, 64))]), photometric="minisblack")
    refused(r"p\.tif: has 2 pages; save each as a picture of its own", slides.layout, tmp_path / "p.tif")
    tifffile.imwrite(tmp_path / "t.tif", np.stack([array((64, 64))] * 2), tile=(16, 16), photometric="minisblack")
    refused(r"t\.tif: has 2 pages; save each as a picture of its own", slides.layout, tmp_path / "t.tif")
    with patch("consilium.data.safe_open.MOST_PIXELS", 1000):
        tifffile.imwrite(tmp_path / "d.tif", array((64, 64), np.uint16), tile=(16, 16))
        refused(r"d\.tif: has values of 16 bits; save a picture of this size with 8 bits", slides.layout, tmp_path / "d.tif")
    data = (tmp_path / "a.tif").read_bytes()
    (tmp_path / "a.tif").write_bytes(data[: len(data) // 2])
    refused(r"a\.tif: (tile|slide|image) cannot be read", slides.read, tmp_path / "a.tif", (200, 186, 64, 64))


def test_16_bits_get_one_window_for_all_tiles(tmp_path: Path) -> None:
    ramp = np.tile(np.linspace(1000, 5000, 512).astype(np.uint16), (512, 1))
    tifffile.imwrite(tmp_path / "a.tif", ramp, tile=(64, 64))
    left, right = (read_image(Item(tmp_path / "a.tif", None, tile=(x, 0, 64, 64))) for x in (0, 448))
    assert left.max() < 40
    assert right.min() > 215


BIG = """
import resource, sys
import numpy as np, tifffile
from pathlib import Path
from consilium.data import slides
from consilium.data.check import check_datalist
path = Path(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
total = 0
rows, columns = slides.shape(path)
for x, y in ((0, 0), (10_000, 7_000), (columns - 512, rows - 512)):
    total += int(slides.read(path, (x, y, 512, 512))[0, 0, 0])
print(total, rows, columns, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def blocks() -> Any:
    for number in range(50 * 50):
        yield np.full((512, 512, 3), number % 251, np.uint8)


@pytest.mark.slow
def test_a_picture_of_655_million_pixels_takes_little_memory(tmp_path: Path) -> None:
    """Decoded at once it would take 2 GB. Blocks are numbered row by row, so (10000, 7000) lies in 13 * 50 + 19 = 669."""
    path = tmp_path / "big.tif"
    tifffile.imwrite(path, blocks(), shape=(25_600, 25_600, 3), dtype=np.uint8, tile=(512, 512), compression="zlib")
    found = subprocess.run([sys.executable, "-c", BIG, path], capture_output=True, text=True, check=True)
    total, rows, columns, more = map(int, found.stdout.split())
    assert (rows, columns) == (25_600, 25_600)
    assert total == 0 + 669 % 251 + 2499 % 251
    assert more < 200
    refused(r"over 100,000,000 pixels\); save it as a tiled, little-endian TIFF and set task", read_image, path)


def test_the_check_looks_at_a_large_picture_by_parts(tmp_path: Path) -> None:
    path = listed(tmp_path, labelled())
    settings = PictureSettings(tiles=TilesConfig(size=128))
    report = check_datalist(path, {"a": [1], "b": [2]}, settings)
    assert report.problems == {"duplicate between splits": ["test: a.tif = training: a.tif"]}
    assert report.planes == {"training": 6, "test": 6}
    assert report.sizes == {"330x250": 2}
    assert set(report.label_values) == {0, 1, 2}
    assert list(check_datalist(path, {"a": [1]}, settings).problems) == ["undeclared label value", "duplicate between splits"]
    tifffile.imwrite(tmp_path / "m.tif", labelled()[:, :-1], tile=(64, 64))
    assert "mask of another size" in check_datalist(path, {"a": [1], "b": [2]}, settings).problems


def test_levels_of_a_plain_pyramid(tmp_path: Path) -> None:
    values = array((256, 320, 3))
    with tifffile.TiffWriter(tmp_path / "a.tif") as file:
        file.write(values, tile=(64, 64), photometric="rgb", metadata=None)
        for step in (2, 4):
            file.write(values[::step, ::step], tile=(64, 64), photometric="rgb", subfiletype=1, metadata=None)
    assert slides.layout(tmp_path / "a.tif").levels == ((256, 320), (128, 160), (64, 80))
    for level, step in enumerate((1, 2, 4)):
        tile = (10, 11, 40, 30)
        assert np.array_equal(slides.read(tmp_path / "a.tif", tile, level), cut(values[::step, ::step], tile))


def test_levels_of_a_mask_are_read_as_stored(tmp_path: Path) -> None:
    values = array((256, 320))
    for name, whole in (("even", values), ("odd", values[:250, :318])):
        with tifffile.TiffWriter(tmp_path / f"{name}.tif") as file:
            for step in (1, 2, 4):
                file.write(whole[::step, ::step], tile=(64, 64), subfiletype=int(step > 1), metadata=None)
    for step in (1, 2, 4):
        part, tile = values[::step, ::step], (10, 11, 40, 30)
        labels = slides.read_labels(tmp_path / "even.tif", tile, part.shape[:2]).values
        assert labels is not None
        assert np.array_equal(labels, cut(part, tile))
    with pytest.raises(DataError, match=r"odd\.tif: mask is 318x250 pixels \(width x height\), its image 80x63"):
        slides.read_labels(tmp_path / "odd.tif", (0, 0, 16, 16), (63, 80))


PALETTE = np.repeat(np.arange(256, dtype=np.uint16)[None, ::-1] * 257, 3, axis=0)


@pytest.mark.parametrize(
    "how",
    [
        {"photometric": "palette", "colormap": PALETTE},
        {"extratags": [(274, 3, 1, 3, True)]},
        {"data": array((128, 128, 4)), "photometric": "rgb", "extrasamples": ["unassalpha"]},
        {"data": array((128, 128)).astype(np.int8)},
        {"data": array((3, 128, 128)), "photometric": "rgb", "planarconfig": "separate"},
    ],
    ids=["palette", "turned", "transparency", "sign", "planes"],
)
def test_a_large_tiff_that_openslide_would_change_is_refused(how: dict[str, Any], tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "a.tif", **{"data": array((128, 128)), "tile": (64, 64), "metadata": None} | how)
    with patch("consilium.data.safe_open.MOST_PIXELS", 1000), pytest.raises(DataError, match=r"a\.tif: save the TIFF upright"):
        slides.read_labels(tmp_path / "a.tif", (0, 0, 16, 16), (128, 128))


@pytest.mark.parametrize("most", [10**8, 1000])
def test_a_tile_that_is_not_stored_is_background(most: int, tmp_path: Path) -> None:
    path, values = tmp_path / "a.tif", array((128, 128)) | 1
    tifffile.imwrite(path, values, tile=(64, 64), metadata=None)
    with tifffile.TiffFile(path) as file:
        places = [file.pages[0].tags[tag].valueoffset for tag in (324, 325)]
    data = bytearray(path.read_bytes())
    for at in places:
        data[at : at + 2] = bytes(2)
    path.write_bytes(data)
    values[:64, :64] = 0
    with patch("consilium.data.safe_open.MOST_PIXELS", most):
        labels = slides.read_labels(path, (0, 0, 128, 128), (128, 128)).values
    assert np.array_equal(np.asarray(labels), values)
    refused(r"a\.tif: has parts that are not stored; save it anew, or set task\.tiles", slides.read_whole, path)


def test_a_header_that_promises_more_than_the_file_has_is_refused_at_once(tmp_path: Path) -> None:
    tags = [(256, 2**31), (257, 2**31), (258, 8), (259, 1), (262, 1), (277, 1), (322, 512), (323, 512), (324, 8), (325, 8)]
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    (tmp_path / "a.tif").write_bytes(b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + struct.pack("<I", 0))
    refused(r"a\.tif: (slide|image) cannot be read|a\.tif: has over", slides.layout, tmp_path / "a.tif")
    refused("1,048,576 tiles, at most 1,000,000 are cut", slides.tiles, (2**14, 2**14), TilesConfig(size=16))
