"""How fast samples come: `python -m tests.benchmarks.loading [NAME ...]`.

Pictures are drawn, so nothing need be fetched. Rates are of one run, the ways measured in turn (A B C A B C ...), medians
over the turns; processor time stands beside them, because a machine that others use at the same time falsifies the clock only.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from monai.data import CacheDataset, PersistentDataset
from monai.transforms import (
    CastToTyped,
    Compose,
    EnsureChannelFirstd,
    Lambdad,
    LoadImaged,
    RandAdjustContrastd,
    RandFlipd,
    RandGaussianNoised,
    RandRotate90d,
    RandScaleIntensityd,
    Resize,
    Resized,
    ScaleIntensityRanged,
)  # fmt: skip
from PIL import Image
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian, SecondaryCaptureImageStorage, generate_uid

from consilium.config.job import TrainingConfig
from consilium.data import check_samples, images
from consilium.data.datalist import DataList, Loading, read_datalist
from consilium.data.disk_cache import open_disk_cache
from consilium.data.settings import PictureSettings, WindowConfig
from consilium.tasks.base import Batch
from consilium.tasks.segmentation.task import SegmentationTask
from consilium.training.loop import prefetched_batches

CLASSES = {"disc": [1, 2], "cup": [2]}
SIDE, LARGE, COUNT, BATCH = 1024, 1600, 24, 4
STEP = 0.15
"""Seconds of a GPU's step, in which this processor has nothing to do."""
TURNS = 3
MANY = 10_000


def draw(folder: Path, count: int, side: int) -> DataList:
    """Write pictures as a camera's, smooth with some noise, with masks; return their list."""
    state, entries = np.random.RandomState(0), []
    rows, columns = np.mgrid[:side, :side] / side
    for index in range(count):
        centre = state.rand(2) / 2 + 0.25
        far = np.hypot(rows - centre[0], columns - centre[1])
        noise = state.randint(0, 12, (side, side, 1))
        picture = (np.stack([200 - far * 180, 140 - far * 120, 90 - far * 60], 2) + noise).clip(0, 255)
        Image.fromarray(picture.astype(np.uint8)).save(folder / f"{index}.png", compress_level=1)
        Image.fromarray((far < 0.3).astype(np.uint8) + (far < 0.1)).save(folder / f"{index}m.png", compress_level=1)
        entries.append({"image": f"{index}.png", "label": f"{index}m.png"})
    (folder / "datalist.json").write_text(json.dumps({"training": entries}))
    return read_datalist(folder / "datalist.json")


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds by the clock and of this process' processor time."""
    began = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - began[0], time.process_time() - began[1]


def task_of(data: DataList, folder: Path | None, workers: int) -> SegmentationTask:
    """Return the task on these samples; nothing is kept in memory, so that the disk is what is measured."""
    loading = Loading(folder, 10**11 if folder else 0, workers)
    made = SegmentationTask(replace(data, loading=loading), CLASSES, SIDE)
    made._samples._room = 0
    return made


def epoch(made: SegmentationTask) -> None:
    """Load each sample once, augmented, in batches."""
    for start in range(0, made.num_samples, BATCH):
        made.batch(range(start, min(start + BATCH, made.num_samples)), 0)


def rates(folder: Path) -> None:
    """Samples a second at 1024: read from pictures, read and kept, warm."""
    data = draw(folder, COUNT, LARGE)
    warm = folder / "warm"
    epoch(task_of(data, warm, 0))
    found: dict[str, list[tuple[float, float]]] = {}
    for turn in range(TURNS):
        for workers in (0, 2):
            ways = (("no cache", None), ("cold, filling the cache", folder / f"{turn}-{workers}"), ("warm", warm))
            for name, place in ways:
                made = task_of(data, place, workers)
                if name == "warm":
                    epoch(made)  # the first use in a process also verifies
                found.setdefault(f"{name}, {workers} workers", []).append(timed(lambda made=made: epoch(made)))
    for name, times in found.items():
        rate, spent = (statistics.median(one[i] for one in times) / COUNT for i in (0, 1))
        print(f"{name}: {1 / rate:.1f} samples a second, {spent * 1e3:.0f} ms of processor time a sample")


def waiting(folder: Path) -> None:
    """The share of a step's time that is waiting for data."""
    data, config = draw(folder, COUNT, LARGE), TrainingConfig(rounds=1, batch_size=BATCH)
    for workers in (0, 1, 2, 4):
        made = task_of(data, folder / "cache", workers)
        epoch(made)
        shares = []
        for turn in range(TURNS):
            with closing(prefetched_batches(made, config, turn, 30)) as batches:
                waited = sum(_waited(batches) for _ in range(30))
            shares.append(waited / (waited + 30 * STEP))
        print(
            f"steps of {STEP} s, warm, batch {BATCH}, {workers} workers: {statistics.median(shares):.1%} of the time is waiting"
        )


def _waited(batches: Iterator[Batch]) -> float:
    """Return the seconds until the next batch is here; then take a step."""
    waited = timed(lambda: next(batches))[0]
    time.sleep(STEP)
    return waited


def resize(folder: Path) -> None:
    """MONAI's anti-aliased resize, which was ours, over PIL's; and how far apart they are."""
    data = draw(folder, 1, LARGE)
    picture = np.asarray(Image.open(data.splits["training"][0].image))
    theirs = Resize((SIDE, SIDE), mode="bilinear", anti_aliasing=True)
    tensor = torch.from_numpy(picture.copy()).permute(2, 0, 1).float()
    ways: tuple[Callable[[], object], ...] = (lambda: theirs(tensor), lambda: images.resize(picture, SIDE))
    times = [[timed(way)[1] for way in ways] for _ in range(TURNS)]
    former, ours = (statistics.median(one[i] for one in times) for i in (0, 1))
    apart = np.abs(theirs(tensor).permute(1, 2, 0).numpy() - images.resize(picture, SIDE))
    print(f"resize {LARGE} to {SIDE}, processor time: MONAI {former * 1e3:.0f} ms, PIL {ours * 1e3:.0f} ms")
    print(f"their difference: mean {apart.mean():.2f} grey levels")


def check(folder: Path) -> None:
    """Time and memory of 10,000 files: `data check`, and the look before training."""
    data = draw(folder, MANY // 2, 64)
    words = ["consilium", "data", "check", str(data.path)]
    code = f"import sys; sys.argv = {words!r}; from consilium.cli.main import main; main()"
    clock = timed(lambda: subprocess.run([sys.executable, "-c", code], check=False, capture_output=True))[0]
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent, peak = used.ru_utime + used.ru_stime, used.ru_maxrss / 1024
    print(f"data check of {MANY:,} files: {clock:.0f} s, {spent:.0f} s of processor time, peak {peak:.0f} MiB")
    look(data, "one thread", Loading())
    look(data, "two workers", Loading(folder, 10**9, 2))
    look(data, "again, nothing has changed", Loading(folder, 10**9, 0))


def as_dicom(data: DataList) -> DataList:
    """Write the pictures' first channel as DICOM files of 16 bits, 0 to 4,080, and return their list."""
    for item in data.splits["training"]:
        made = Dataset()
        made.file_meta = FileMetaDataset()
        made.file_meta.TransferSyntaxUID, made.file_meta.MediaStorageSOPClassUID = (
            ExplicitVRLittleEndian,
            SecondaryCaptureImageStorage,
        )
        made.SOPClassUID, made.SOPInstanceUID = SecondaryCaptureImageStorage, generate_uid()
        made.Modality, made.PhotometricInterpretation, made.SamplesPerPixel = "DX", "MONOCHROME2", 1
        pixels = np.asarray(Image.open(item.image))[..., 0].astype(np.uint16) * 16
        made.Rows, made.Columns = pixels.shape
        made.BitsAllocated, made.BitsStored, made.HighBit, made.PixelRepresentation = 16, 12, 11, 0
        made.RescaleSlope, made.RescaleIntercept, made.PixelData = 1, 0, pixels.tobytes()
        made.save_as(item.image.with_suffix(".dcm"), enforce_file_format=True)
    listed = json.loads((Path(data.path).parent / "datalist.json").read_text())
    entries = [entry | {"image": str(Path(entry["image"]).with_suffix(".dcm"))} for entry in listed["training"]]
    (Path(data.path).parent / "dicom.json").write_text(json.dumps({"training": entries}))
    return read_datalist(Path(data.path).parent / "dicom.json")


def as_monai(dicom: bool, anti_aliasing: bool) -> Compose:
    """Return MONAI's transforms that do what a sample of the task goes through; what is kept is kept as bytes, as ours is."""
    both = ("image", "label")
    shades = [ScaleIntensityRanged("image", 0, 4080, 0, 255, clip=True), Lambdad("image", lambda one: one.expand(3, -1, -1))]
    return Compose([
        LoadImaged(both, image_only=True),
        EnsureChannelFirstd(both),
        Lambdad("label", lambda one: torch.cat([one > 0, one == 2])),
        *(shades if dicom else ()),
        CastToTyped(both, np.float32),
        Resized("image", (SIDE, SIDE), mode="bilinear", anti_aliasing=anti_aliasing),
        Resized("label", (SIDE, SIDE), mode="nearest"),
        CastToTyped(both, np.uint8),
        RandFlipd(both, 0.5, 0),
        RandFlipd(both, 0.5, 1),
        RandRotate90d(both, 0.5),
        CastToTyped(both, np.float32),
        RandAdjustContrastd("image", 0.3, (0.8, 1.25)),
        RandScaleIntensityd("image", 0.15, 0.3),
        RandGaussianNoised("image", 0.2, std=4.0),
    ])  # fmt: skip


def monai(folder: Path) -> None:
    """An epoch at 1024 from PNG and from DICOM: ours, and MONAI's PersistentDataset and CacheDataset, in turns."""
    torch.set_num_threads(1)
    pictures = draw(folder, COUNT, LARGE)
    for kind, data in (("PNG", pictures), ("DICOM", as_dicom(pictures))):
        found: dict[str, list[tuple[float, float]]] = {}
        for turn in range(TURNS):
            for name, make in ways(data, folder / f"{kind}-{turn}", kind == "DICOM").items():
                again = list[Callable[[], None]]()

                def first(make: Callable[[], Callable[[], None]] = make, again: list[Callable[[], None]] = again) -> None:
                    again.append(make())
                    again[0]()

                found.setdefault(f"cold, {name}", []).append(timed(first))
                found.setdefault(f"warm, {name}", []).append(timed(again[0]))
        for name, times in found.items():
            clock, spent = (statistics.median(one[i] for one in times) / COUNT * 1e3 for i in (0, 1))
            print(f"{kind}, {name}: {spent:.0f} ms of processor time a sample, {clock:.0f} ms by the clock", flush=True)


def ways(data: DataList, place: Path, dicom: bool) -> dict[str, Callable[[], Callable[[], None]]]:
    """Return by name what makes a data set of this list, which keeps its samples below `place` or in memory, and an epoch."""
    window = PictureSettings(window=WindowConfig(center=2040, width=4080)) if dicom else PictureSettings()
    items = [{"image": str(item.image), "label": str(item.label)} for item in data.splits["training"]]

    def ours(folder: Path | None) -> Callable[[], None]:
        made = SegmentationTask(replace(data, loading=Loading(folder, 10**11 if folder else 0)), CLASSES, SIDE, settings=window)
        made._samples._room = 0 if folder else made._samples._room
        return lambda: epoch(made)

    def theirs(kind: Any, smooth: bool, *where: Path, **how: Any) -> Callable[[], None]:
        made = kind(items, as_monai(dicom, smooth), *where, **how)
        return lambda: batches_of(made)

    return {
        "Consilium, disk": lambda: ours(place),
        "MONAI PersistentDataset": lambda: theirs(PersistentDataset, True, place.with_suffix(".smooth")),
        "MONAI PersistentDataset, not anti-aliased": lambda: theirs(PersistentDataset, False, place.with_suffix(".plain")),
        "Consilium, memory": lambda: ours(None),
        "MONAI CacheDataset": lambda: theirs(CacheDataset, True, progress=False),
    }


def batches_of(made: Any) -> None:
    """Load each sample of a MONAI data set once, in batches."""
    for start in range(0, len(made), BATCH):
        rows = [made[index] for index in range(start, min(start + BATCH, len(made)))]
        for key in ("image", "label"):
            torch.stack([row[key].as_tensor() for row in rows])


def look(data: DataList, name: str, loading: Loading) -> None:
    """Print how long the look before training takes."""
    store, listed = open_disk_cache(loading.folder, loading.most), replace(data, loading=loading)
    clock, spent = timed(
        lambda: list(check_samples.find_errors(listed, lambda i: check_samples.check_and_find_vanished(i, CLASSES), "", store))
    )
    print(f"the look before training, {name}: {clock:.1f} s, {spent:.1f} s of processor time")


PARTS = {"resize": resize, "rates": rates, "waiting": waiting, "check": check, "monai": monai}


def main() -> None:
    """Run the parts named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=["all", *PARTS], default="all")
    names = parser.parse_args().names
    for name in PARTS if "all" in names else names:
        with tempfile.TemporaryDirectory() as folder:
            PARTS[name](Path(folder))


if __name__ == "__main__":
    main()
