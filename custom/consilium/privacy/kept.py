"""The bytes of a site's last release in a run: a replayed task gets them again, whatever comes now."""

from pathlib import Path

from consilium.messages import Payload
from consilium.storage import load_state, save_state

FILE = "released.safetensors"


def keep(folder: Path, released: Payload, spends: bool) -> None:
    """Write a release and whether it costs anything into the run's private folder."""
    meta = {"round": released.round, "phase": released.phase, "scalars": released.scalars, "metrics": released.metrics}
    save_state(folder / FILE, released.tensors, meta | {"spends": spends})


def last(folder: Path) -> tuple[Payload | None, bool]:
    """Return the last release and whether it costs anything, as decided then; None before the first. Raises CheckpointError."""
    if not (folder / FILE).exists():
        return None, True
    tensors, meta = load_state(folder / FILE)
    return Payload(meta["round"], meta["phase"], tensors, meta["scalars"], meta["metrics"]), meta["spends"]
