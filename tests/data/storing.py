"""A site of small pictures for tests of loading."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

from consilium.data.datalist import DataList, read_datalist

CLASSES = {"disc": [1, 2], "cup": [2]}


def make_site(folder: Path, training: int = 5, test: int = 2, side: int = 40) -> Path:
    """Write pictures with masks, no two equal, and their data list; return the list."""
    state = np.random.RandomState(0)
    folder.mkdir(parents=True, exist_ok=True)
    lists: dict[str, list[dict[str, str]]] = {}
    for split, count in (("training", training), ("test", test)):
        for index in range(count):
            name = f"Muster_Erika_{split}_{index}"
            mask = np.zeros((side, side), np.uint8)
            mask[: side // 2], mask[: side // (3 + index)] = 1, 2
            Image.fromarray(state.randint(0, 256, (side, side, 3)).astype(np.uint8)).save(folder / f"{name}.png")
            Image.fromarray(mask).save(folder / f"{name}_mask.png")
            lists.setdefault(split, []).append({"image": f"{name}.png", "label": f"{name}_mask.png", "patient": "Muster^Erika"})
    (folder / "datalist.json").write_text(json.dumps(lists))
    return folder / "datalist.json"


def made(folder: Path, **counts: int) -> DataList:
    """Return the list of such a site."""
    return read_datalist(make_site(folder, **counts))


def break_pixels(path: Path) -> None:
    """Damage a PNG so that its header is read and its pixels are not."""
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
