"""Finds GGUF files, which hold quantized weights for llama.cpp, and refuses them as a base model."""

from pathlib import Path

from consilium.core.errors import CheckpointError

GGUF = ".gguf"


def gguf_files(path: Path) -> list[Path]:
    """Return the GGUF file at `path`, or those in a folder without a model of `transformers`."""
    if path.is_dir():
        return [] if (path / "config.json").exists() else sorted(path.glob(f"*{GGUF}"))
    return [path] if path.suffix.lower() == GGUF and path.is_file() else []


def refuse_gguf(path: Path, field: str = "model.checkpoint") -> None:
    """Raise CheckpointError for a GGUF file, and for a folder of such files alone."""
    if found := gguf_files(path):
        raise CheckpointError(
            f"{field}: {path}: GGUF, which no job reads; import it once: consilium models import {found[0]} -o FOLDER, and "
            "name FOLDER here"
        )
