"""Which tasks a job has, of what kind, in which round and phase; and what a site calls the run they belong to."""

import os
import re
from pathlib import Path

from consilium.config.job import JobConfig
from consilium.core.errors import Reason, RefusedError
from consilium.core.messages import HELD_OUT, Kind
from consilium.core.storage import locked, note, noted, room_for, unreadable
from consilium.privacy.guard.model_sharing import MODELS
from consilium.privacy.guard.task import Task
from consilium.strategies.strategy import Strategy

ASIDE = (-1, -1)
"""Where a task stands that belongs to no round."""
HOMES = "homes.json"
"""Beside the records of all runs: in which folder the state and the answers of each private run lie."""


def own_run(name: str, run: str, digest: str, job_id: str) -> str:
    """Return the site's folder for a run of the job with this `digest`: the server's word alone is not enough.

    Raises RefusedError for one that is none.
    """
    if not re.fullmatch(r"[A-Za-z0-9-]{0,64}", run) or not (run or job_id):
        raise RefusedError(f"{name}: {run[:80]!r} is no name of a run; nothing was sent", Reason.TASK)
    return f"{run or f'job-{job_id}'}.{digest[:16]}"


def claim(name: str, records: Path, folder: Path, run: str) -> None:
    """Note in which `folder` a private run is at home. Raises RefusedError for another one than before.

    The ledger knows a run by the server's name for it, while each submission may have a folder of its own. In another folder
    the site would have neither state nor answers of the run, and train it again, on whatever the server sends.
    """
    home = os.path.relpath(folder, records)
    with room_for(records / HOMES), locked(records):
        known = _homes(records / HOMES)
        if run not in known:
            note(records / HOMES, run, {"folder": home})
    if known.get(run, home) != home:
        what = f"run {run} is at home in {known[run]}, see {records / HOMES}; nothing was sent"
        remedy = "give the new job a run of its own, or, if the folder was moved, correct its entry"
        raise RefusedError(f"{name}: {what}; {remedy}", Reason.LEDGER)


def _homes(file: Path) -> dict[str, str]:
    """Return each run's folder as noted. Raises RefusedError where nobody can read it."""
    remedy = "restore it, or remove it where no run goes on"
    try:
        return {run: home["folder"] for run, home in noted(file, remedy).items()}
    except (TypeError, KeyError):
        raise unreadable(file, remedy) from None


def check_place(name: str, config: JobConfig, strategy: Strategy, task: Task, test_only: bool) -> None:
    """Raise RefusedError unless the job asks for this kind of task there. `test_only`: the site never trains."""
    if not _asks(config, strategy, task.kind, task.place, test_only):
        what = "the job has no task {} in round {} phase {}; nothing was sent".format(task.kind, *task.place)
        raise RefusedError(f"{name}: {what}", Reason.TASK)


def ends(config: JobConfig, round: int) -> bool:
    """Tell whether the closing evaluation may come after so many rounds: all of them, or fewer where scores end the job."""
    rounds = config.training.rounds
    return round == rounds or (config.training.validation.patience > 0 and 0 < round <= rounds)


def _asks(config: JobConfig, strategy: Strategy, kind: Kind, place: tuple[int, int], test_only: bool) -> bool:
    (round, phase), rounds = place, config.training.rounds
    known = config.trains and 0 <= round < rounds
    scored = MODELS if config.cross_site and config.cross_site.personalized else 0
    return {
        Kind.HELLO: place == ASIDE,
        Kind.STATISTICS: place == ASIDE and config.statistics is not None and config.cross_site is None,
        Kind.MASKS: place == ASIDE and config.trains and config.secure_aggregation is not None and not test_only,
        Kind.MODEL: place == ASIDE and config.cross_site is not None,
        Kind.TRAIN: known and not test_only and 0 <= phase < strategy.traits.phases_of(round),
        Kind.EVALUATE: ((config.trains or config.cross_site is not None) and ends(config, round) and 0 <= phase <= scored)
        or (known and phase == HELD_OUT),
    }[kind]
