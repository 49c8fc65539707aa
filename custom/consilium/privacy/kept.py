"""The bytes of a site's last release in a run: a replayed task gets them again, whatever comes now."""

from pathlib import Path

from consilium.errors import Reason, RefusedError
from consilium.messages import Payload
from consilium.storage import load_state, room_for, save_state

FILE = "released.safetensors"


def keep(folder: Path, released: Payload) -> None:
    """Write a release into the run's private folder. Raises RefusedError where it cannot."""
    meta = {"round": released.round, "phase": released.phase, "scalars": released.scalars, "metrics": released.metrics}
    with room_for(folder / FILE):
        save_state(folder / FILE, released.tensors, meta)


def at(folder: Path, place: tuple[int, int]) -> Payload | None:
    """Return the release of a round and phase, None where it is not kept.

    Raises RefusedError behind a later one, because only the last is kept; CheckpointError.
    """
    if not (folder / FILE).exists():
        return None
    tensors, meta = load_state(folder / FILE)
    if (last := (meta["round"], meta["phase"])) > place:
        what = "round {} phase {} is stale, the last that left is round {} phase {}".format(*place, *last)
        raise RefusedError(f"{folder / FILE}: {what}; nothing was sent", Reason.TASK)
    return Payload(*last, tensors, meta["scalars"], meta["metrics"]) if last == place else None
