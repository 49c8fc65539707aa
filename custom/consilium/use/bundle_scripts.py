"""Code of this MONAI bundle: reads and prepares pictures, runs the network, and writes masks or classes.

It needs only MONAI, torch, numpy and Pillow. The package `consilium` copies this file into every bundle.
"""

import csv
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Tensor, nn

ENDINGS = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp")
FORMATS = ("PNG", "JPEG", "TIFF", "BMP")
"""Formats that may be read. Some of Pillow's other readers start programs such as Ghostscript."""
MODES = ("L", "I;16", "I;16B", "I;16L", "I", "F", "RGB", "1")
MOST_COUNTED = 2**22
PIXELS = "write pixels from the left and the top"


def load_network(path: str, device: torch.device) -> nn.Module:
    """Load an exported program from `path`, and return it as a network on `device`."""
    program = torch.export.load(path)
    if device.type != "cpu":
        from torch.export.passes import move_to_device_pass

        program = move_to_device_pass(program, str(device))
    return Network(program.module())


class Network(nn.Module):
    """An exported program as an ordinary module. It has only one mode, so `train` and `eval` have no effect."""

    def __init__(self, program: nn.Module) -> None:
        super().__init__()
        self.program = program

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return logits."""
        return self.program(*inputs)

    def train(self, mode: bool = True) -> "Network":
        """Return itself."""
        return self


def find_pictures(
    place: str, prompts: str = "", classes: Sequence[str] = (), columns: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Return one dict per picture in a folder, or for a single file, for MONAI's Dataset.

    `classes`: those of the masks, if masks are written. If the network takes prompts, `columns` are given, and each dict has
    "prompts" from the file `prompts`, see `read_prompts`. For a missing prompt, which is NaN, the network uses the whole
    picture. Raises ValueError, also for a picture without any prompt in the file.
    """
    path = Path(place)
    below = (p for p in path.rglob("*") if p.suffix.lower() in ENDINGS and not p.name.startswith("."))
    found = [path] if path.is_file() else sorted(below)
    if not found:
        raise ValueError(f"{place}: no pictures there ({', '.join(ENDINGS)}); give --dataset_dir FOLDER or FILE")
    outputs = Counter(name for p in found for name in [mask_name(p, c).casefold() for c in classes] or [p.name])
    if twice := next((name for name, count in outputs.items() if count > 1), None):
        raise ValueError(f"{place}: two outputs would be named {twice!r}; rename a picture, or run the pictures one by one")
    if not columns:
        return [{"image": str(p)} for p in found]
    known = read_prompts(prompts, classes, columns) if prompts else {}
    if lacking := next((p.name for p in found if prompts and not any((p.name, c) in known for c in classes)), None):
        raise ValueError(f"{prompts}: names no image {lacking!r}; add one, or leave the picture out")
    unknown = [float("nan")] * len(columns)
    return [{"image": str(p), "prompts": [known.get((p.name, c), unknown) for c in classes]} for p in found]


def read_prompts(path: str, classes: Sequence[str], columns: Sequence[str]) -> dict[tuple[str, str], list[float]]:
    """Return the prompts by (image, class) from a CSV file with image, class and `columns`, in pixels. Raises ValueError.

    `columns`: left, top, right and bottom of a box, or x and y of a point.
    """
    found: dict[tuple[str, str], list[float]] = {}
    for number, row in enumerate(csv.DictReader(Path(path).read_text(encoding="utf-8-sig").splitlines()), start=1):
        where = f"{path}: row {number}"
        if missing := [key for key in ("image", "class", *columns) if not row.get(key)]:
            raise ValueError(f"{where}: lacks {missing[0]}; write image,class,{','.join(columns)}")
        if row["class"] not in classes:
            raise ValueError(f"{where}: class {row['class']!r} is none of the network's: {', '.join(classes)}")
        if (row["image"], row["class"]) in found:
            raise ValueError(f"{where}: {row['image']} has two for {row['class']!r}; keep one")
        try:
            prompt = [float(row[column]) for column in columns]
        except ValueError:
            raise ValueError(f"{where}: has a value that is not a number; {PIXELS}") from None
        if not all(map(math.isfinite, prompt)) or (len(prompt) == 2 and min(prompt) < 0):
            raise ValueError(f"{where}: has a value that is not 0 or more; {PIXELS}")
        if len(prompt) == 4 and not (prompt[0] < prompt[2] and prompt[1] < prompt[3]):
            raise ValueError(f"{where}: its sides are not left < right and top < bottom; {PIXELS}")
        found[row["image"], row["class"]] = prompt
    return found


def mask_name(picture: str | Path, name: str) -> str:
    """Return the file name of a picture's mask of a class."""
    return f"{Path(picture).stem}_{name}.png"


class ReadPicture:
    """Reads data["image"] into the network's input (3, S, S), float32 in 0..255, stretched or padded to a square.

    `window`: (center, width) of the range of values that is mapped to 0..255. Without a window, 8-bit values stay as they are,
    and other values are mapped from their 0.5 to 99.5 percentiles.
    """

    def __init__(self, side: int, resize: str, padding: Sequence[int], window: Sequence[float] | None = None) -> None:
        self.side, self.resize, self.padding, self.window = side, resize, padding, window

    def __call__(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return "image", "file", "size" (the picture's rows and columns) and "inner" (those it fills in the square).

        If `data` has prompts, "prompts" are returned too, scaled to the square. Raises ValueError for one outside the picture.
        """
        picture = eight_bits(read(data["image"]), self.window)
        size = picture.shape[:2]
        for prompt in data.get("prompts", ()):
            if prompt[0] >= size[1] or prompt[1] >= size[0] or min(prompt[-2:]) < 0:
                raise ValueError(f"{data['image']}: {prompt} lies outside its {size[1]}x{size[0]} pixels; {PIXELS}")
        rows, columns = self.side, self.side
        if self.resize != "stretch":
            rows, columns = (max(1, int(n * self.side / max(size) + 0.5)) for n in size)
        small = np.asarray(Image.fromarray(picture).resize((columns, rows), Image.Resampling.BILINEAR))
        square = np.empty((self.side, self.side, 3), np.uint8)
        square[:], square[:rows, :columns] = self.padding, small
        image = torch.from_numpy(np.ascontiguousarray(square.transpose(2, 0, 1))).float()
        found = {"image": image, "file": data["image"], "size": size, "inner": (rows, columns)}
        if "prompts" in data:
            prompts = torch.tensor(data["prompts"], dtype=torch.float32)
            found["prompts"] = prompts * torch.tensor([columns / size[1], rows / size[0]]).repeat(prompts.shape[1] // 2)
        return found


def read(path: str) -> np.ndarray:
    """Return a picture's values, (H, W) or (H, W, 3), rotated as its EXIF tag says."""
    with Image.open(path, formats=FORMATS) as opened:
        upright = ImageOps.exif_transpose(opened)
        array = np.asarray(upright if upright.mode in MODES else upright.convert("RGB"))
    return array.astype(np.uint8) * 255 if array.dtype == bool else array


def eight_bits(values: np.ndarray, window: Sequence[float] | None) -> np.ndarray:
    """Return values as 8-bit (H, W, 3); see ReadPicture for `window`."""
    if not (values.dtype == np.uint8 and (values.ndim == 3 or window is None)):
        low, high = percentiles(values) if window is None else (window[0] - window[1] / 2, window[0] + window[1] / 2)
        share = (values.astype(np.float32) - low) / max(high - low, 1e-6)
        values = (np.clip(share, 0, 1) * 255 + 0.5).astype(np.uint8)
    return values[..., :3] if values.ndim == 3 else np.repeat(values[..., None], 3, 2)


def percentiles(values: np.ndarray) -> tuple[float, float]:
    """Return the 0.5 and 99.5 percentiles. Of many values, only every n-th is counted."""
    flat = values.reshape(-1)
    low, high = np.percentile(flat[:: max(1, flat.size // MOST_COUNTED)], [0.5, 99.5])
    return float(low), float(high)


class WriteMasks:
    """Writes one mask per class, NAME_CLASS.png, with values 0 and 255 and the size of the picture."""

    def __init__(self, folder: str, classes: Sequence[str]) -> None:
        self.folder, self.classes = Path(folder), classes

    def __call__(self, logits: Tensor, data: Mapping[str, Any]) -> None:
        """Resize the logits (C, S, S) to the picture's size, and write as masks where they are over 0."""
        self.folder.mkdir(parents=True, exist_ok=True)
        rows, columns = data["inner"]
        own = F.interpolate(logits[None, :, :rows, :columns], tuple(data["size"]), mode="bilinear", align_corners=False)[0]
        for name, mask in zip(self.classes, own > 0, strict=True):
            picture = Image.fromarray(mask.cpu().numpy().astype(np.uint8) * 255)
            picture.save(self.folder / mask_name(data["file"], name))

    def close(self) -> None:
        """Do nothing: every picture has its files."""


class WriteClasses:
    """Writes classes.csv with one row per picture: its likeliest class, and the probability of each class."""

    def __init__(self, folder: str, classes: Sequence[str]) -> None:
        self.folder, self.classes = Path(folder), classes
        self.rows: list[list[str]] = []

    def __call__(self, logits: Tensor, data: Mapping[str, Any]) -> None:
        """Store the table row for logits (C,)."""
        probabilities = logits.softmax(0).tolist()
        likeliest = self.classes[int(logits.argmax())]
        self.rows.append([Path(data["file"]).name, likeliest, *(f"{value:.6f}" for value in probabilities)])

    def close(self) -> None:
        """Write the table, after the last picture."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / "classes.csv", "w", encoding="utf-8", newline="") as file:
            rows = [["image", "class", *self.classes], *self.rows]
            # no spreadsheet may read a cell as a formula
            safe = [[f"'{cell}" if cell and cell[0] in "=+-@\t\r\n" else cell for cell in row] for row in rows]
            csv.writer(file).writerows(safe)


class Inference:
    """Runs the network on every picture of a dataset, one at a time, and passes the logits to `postprocessing`."""

    def __init__(
        self,
        device: torch.device,
        network: nn.Module,
        dataset: Any,
        inferer: Callable[..., Tensor],
        postprocessing: WriteMasks | WriteClasses,
    ) -> None:
        self.device, self.network, self.dataset = device, network, dataset
        self.inferer, self.postprocessing = inferer, postprocessing

    @torch.no_grad()
    def run(self) -> None:
        """Process all pictures."""
        for index in range(len(self.dataset)):
            data = self.dataset[index]
            inputs = [data[name][None].to(self.device) for name in ("image", "prompts") if name in data]
            self.postprocessing(self.inferer(inputs[0], self.network, *inputs[1:])[0].float().cpu(), data)
        self.postprocessing.close()
