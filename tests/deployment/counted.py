"""What crosses the wire, counted without this package, from what `tap/sitecustomize.py` wrote down in a site's processes.

The tap keeps the frames that FLARE's transport was handed, and every message before FLARE encodes it, as plain values. What a
relay before the site counted must be the frames and what TLS adds; of all messages only answers to tasks hold tensors.
"""

import json
import pickle
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

TAP = Path(__file__).parent / "tap"
SIZES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int32": 4, "int64": 8, "uint8": 1, "bool": 1}


def frames(folder: Path) -> list[int]:
    """Return the bytes of each frame that the processes of a site handed to the transport."""
    return [int(line) for path in folder.glob("*.frames") for line in path.read_text().split()]


def messages(folder: Path) -> Iterator[Any]:
    """Yield every message of a site's processes, as plain values."""
    for path in sorted(folder.glob("*.messages")):
        with open(path, "rb") as file, suppress(EOFError, pickle.UnpicklingError):  # a killed process may have begun one
            while True:
                yield pickle.load(file)


def tensors_in(value: Any) -> Iterator[tuple[str, tuple[int, ...], bytes]]:
    """Yield (dtype, shape, bytes) of every tensor anywhere in a message."""
    if isinstance(value, tuple):
        yield value[1:]
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(one)


def answers(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (kind of task, message) for each answer to a task that a site handed to FLARE."""
    for message in messages(folder):
        headers = message.get("__headers__") or {} if isinstance(message, dict) else {}
        if "__task_name__" in headers and ("DXO" in message or _asked(message) or "consilium_reason" in headers):
            yield headers["__task_name__"], message


def _asked(message: Any) -> str:
    return next((key for key in ("hello", "statistics", "masks") if isinstance(message, dict) and key in message), "")


def said(message: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the named tensors of an answer as the record should describe them; a buffer of small ones is cut up here."""
    data, meta = dict(message["DXO"]["data"]), message["DXO"]["meta"].get("consilium")
    found: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    listed = json.loads(zlib.decompress(meta))[0] if isinstance(meta, bytes) else [[name] for name in data]
    buffer, place = data.pop("consilium_buffer", ("tensor", "uint8", (0,), b""))[3], 0
    for name, *kind in listed:
        if kind:
            size = SIZES[kind[0]] * int(np.prod(kind[1], dtype=int))
            found[name] = (kind[0], tuple(kind[1]), buffer[place : place + size])
            place += size
        else:
            found[name] = data[name][1:]
    assert place == len(buffer)
    return {name: _described(*one) for name, one in found.items()}


def _described(dtype: str, shape: tuple[int, ...], raw: bytes) -> dict[str, Any]:
    values = np.frombuffer(raw, np.dtype(dtype)).astype(float)
    return {"shape": list(shape), "dtype": dtype, "bytes": len(raw), "norm": f"{np.sqrt((values**2).sum()):.6g}"}
