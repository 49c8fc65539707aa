"""Atomic, checksummed files of tensors with a JSON header: the server's checkpoint and a site's private state. No pickle."""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from consilium.errors import CheckpointError


def save_state(path: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
    """Write `tensors` and the JSON-able `meta` so that a crash leaves either the old file or the new one."""
    ready = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    header = {"meta": json.dumps(dict(meta)), "sha256": digest(ready)}
    write_atomic(path, save(ready, metadata=header))


def load_state(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return (tensors, meta) of a file that `save_state` wrote. Raises CheckpointError if it is missing or damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
            header = file.metadata() or {}
        meta, expected = json.loads(header["meta"]), header["sha256"]
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path}: not a readable state file ({error}); restore it or start afresh") from None
    if digest(tensors) != expected:
        raise CheckpointError(f"{path}: checksum does not match, the file is damaged; restore it or start afresh")
    return tensors, meta


def write_atomic(path: Path, data: bytes) -> None:
    """Write bytes through a temporary file beside `path`, flushed to disk before it takes the name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Let one process at a time into the block; the lock ends with its process, however that ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file, or of a folder: over its files' names and contents, wherever the folder lies.

    Raises CheckpointError if there is nothing readable at `path`.
    """
    try:
        if path.is_file():
            with open(path, "rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        names = sorted(p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file())
        if not names:
            raise CheckpointError(f"{path}: no such file, or a folder without files; give the checkpoint's path")
        parts = "".join(f"{file_hash(path / name)}  {name}\n" for name in names)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); give a readable checkpoint") from None
    return hashlib.sha256(parts.encode()).hexdigest()


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of tensors: names, types, shapes, bytes."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        found.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        found.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
