"""Replaces the path of a model's config.json in a job by the file's contents."""

import json
from pathlib import Path
from typing import Any

import yaml

from consilium.core.errors import ConfigError
from consilium.core.schema import read_yaml
from consilium.models.architecture import refuse_adapter, refuse_gguf

LARGEST = 2**20
"""The largest config.json in bytes. Published ones have a few thousand."""


def embed_architecture(raw: Any, job: Path) -> None:
    """Replace a path in `model.config` of `raw`, the parsed file `job`, by the contents of that config.json.

    The path of the file or its folder is relative to the folder of job.yaml. This is done only on the machine of the job's
    author: a site or server refuses a path and opens no file. Raises ConfigError; CheckpointError for an adapter or a GGUF
    file.
    """
    if named := _config_path(raw):
        raw["model"]["config"] = _read_config(job.parent / named, named, job)


def read_job_bytes(job: Path) -> bytes:
    """Return the contents of the file `job`, with the config.json inserted if the job names one by path. Raises ConfigError."""
    raw = read_yaml(job)
    if not _config_path(raw):
        return job.read_bytes()
    embed_architecture(raw, job)
    return yaml.safe_dump(raw, sort_keys=False).encode()


def _config_path(raw: Any) -> str:
    """Return the path in `model.config`, "" if there is none."""
    model = raw.get("model") if isinstance(raw, dict) else None
    named = model.get("config") if isinstance(model, dict) else None
    return named if isinstance(named, str) else ""


def _read_config(path: Path, named: str, job: Path) -> dict[str, Any]:
    refuse_adapter(path, f"{job}: model.config")
    refuse_gguf(path, f"{job}: model.config")
    path = path / "config.json" if path.is_dir() else path
    found: Any = None
    try:
        if not path.is_file():
            raise FileNotFoundError(2, "no such file")
        with path.open("rb") as file:
            text = file.read(LARGEST + 1)
        found = json.loads(text.decode("utf-8")) if len(text) <= LARGEST else None
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else "no valid JSON"
        remedy = "name a transformers folder or its config.json, by an absolute path or one from job.yaml's folder"
        raise ConfigError(f"{job}: model.config: {named!r}: {why}; {remedy}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{job}: model.config: {named!r}: no map of at most {LARGEST} bytes; name a model's config.json")
    return found
