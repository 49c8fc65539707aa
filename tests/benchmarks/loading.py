"""How fast samples come: `python -m tests.benchmarks.loading [NAME ...]`.

Pictures are drawn, so nothing need be fetched. Rates are of one run, the ways measured in turn (A B C A B C ...), medians
over the turns; processor time stands beside them, because a machine that others use at the same time falsifies the clock only.
"""

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

import numpy as np
import torch
from monai.transforms import Resize
from PIL import Image

from consilium.config.job import TrainingConfig
from consilium.data import images, sample_check
from consilium.data.datalist import DataList, read_datalist
from consilium.data.loading import Loading
from consilium.data.store import open_store
from consilium.tasks.base import Batch
from consilium.tasks.segmentation.task import SegmentationTask
from consilium.training.loop import stream

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
            with closing(stream(made, config, turn, 30)) as batches:
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


def look(data: DataList, name: str, loading: Loading) -> None:
    """Print how long the look before training takes."""
    store, listed = open_store(loading.folder, loading.most), replace(data, loading=loading)
    clock, spent = timed(
        lambda: list(sample_check.find_errors(listed, lambda i: sample_check.check_sample(i, CLASSES), "", store))
    )
    print(f"the look before training, {name}: {clock:.1f} s, {spent:.1f} s of processor time")


PARTS = {"resize": resize, "rates": rates, "waiting": waiting, "check": check}


def main() -> None:
    """Run the parts named, or all."""
    for name in sys.argv[1:] or PARTS:
        with tempfile.TemporaryDirectory() as folder:
            PARTS[name](Path(folder))


if __name__ == "__main__":
    main()
