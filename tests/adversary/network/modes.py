"""Who may read what on a shared machine."""

from pathlib import Path


def open_to_others(folder: Path) -> list[str]:
    """Return what under `folder`, itself included, group or others may read, write or enter."""
    return [f"{p.stat().st_mode & 0o777:o} {p}" for p in (folder, *folder.rglob("*")) if p.stat().st_mode & 0o077]
