"""The tasks that a job may have, by kind, round and phase; and the site's own name for the run of a task."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from consilium.config.job import JobConfig
from consilium.core.errors import Reason, RefusedError
from consilium.core.messages import HELD_OUT, Kind, Payload
from consilium.core.storage import lock_folder, note, read_notes, refuse_if_unwritable, unreadable_error
from consilium.privacy.guard.release import MODELS
from consilium.strategies.strategy import Strategy

# task ------------------------------------------------------------------------------------------------------------------
# A task that the guard has authorized.


@dataclass(frozen=True, eq=False)
class AuthorizedTask:
    """A task that the guard has authorized; the client runs no other. `run`: the site's own name for its run.

    `answered`: the guard already stores the answer, so nothing needs to be trained. `ledger_run`: the run's name in the ledger
    for this attempt, "" if nothing is charged.
    """

    kind: Kind
    run: str
    payload: Payload
    answered: bool = False
    ledger_run: str = ""

    @property
    def place(self) -> tuple[int, int]:
        """The task's round and phase."""
        return self.payload.round, self.payload.phase


# task schedule ---------------------------------------------------------------------------------------------------------

NO_ROUND = (-1, -1)
"""The round and phase of a task that belongs to no round."""
RUN_FOLDERS = "homes.json"
"""The file beside the records of all runs that names, per private run, the folder with its state and answers."""


def site_run_id(name: str, run: str, digest: str, job_id: str) -> str:
    """Return the site's own name for a run, which is also its folder's name.

    It is the server's name `run` (or FLARE's `job_id` if that is empty) plus the start of the job's `digest`, because another
    job could use the same name. Raises RefusedError for an invalid name.
    """
    if not re.fullmatch(r"[A-Za-z0-9-]{0,64}", run) or not (run or job_id):
        raise RefusedError(f"{name}: {run[:80]!r} is not a name of a run; nothing was sent", Reason.TASK)
    return f"{run or f'job-{job_id}'}.{digest[:16]}"


def bind_run_folder(name: str, records: Path, folder: Path, run: str) -> None:
    """Record in which `folder` a private run has its files. Raises RefusedError if it was a different folder before.

    The ledger identifies a run by its name, but each submission may have its own folder. In another folder the site would have
    neither the state nor the answers of the run, and would train again on any values that the server sends.
    """
    home, remedy = os.path.relpath(folder, records), "restore it, or remove it where no run goes on"
    with refuse_if_unwritable(records / RUN_FOLDERS), lock_folder(records):
        try:
            known = {run: one["folder"] for run, one in read_notes(records / RUN_FOLDERS, remedy).items()}
        except (TypeError, KeyError):
            raise unreadable_error(records / RUN_FOLDERS, remedy) from None
        if run not in known:
            note(records / RUN_FOLDERS, run, {"folder": home})
    if known.get(run, home) != home:
        raise RefusedError(
            f"{name}: run {run} is at home in {known[run]}, see {records / RUN_FOLDERS}; nothing was sent; "
            "give the new job a run of its own, or, if the folder was moved, correct its entry",
            Reason.LEDGER,
        )


def check_round_phase(name: str, config: JobConfig, strategy: Strategy, task: AuthorizedTask, test_only: bool) -> None:
    """Raise RefusedError unless the job has this kind of task at its round and phase. `test_only`: the site never trains."""
    (round, phase), rounds, place = task.place, config.training.rounds, task.place
    in_round = config.trains and 0 <= round < rounds
    scored = MODELS if config.cross_site and config.cross_site.personalized else 0
    has_end = config.trains or config.cross_site is not None
    asked = {
        Kind.HELLO: place == NO_ROUND,
        Kind.STATISTICS: place == NO_ROUND and config.statistics is not None and config.cross_site is None,
        Kind.MASKS: place == NO_ROUND and config.trains and config.secure_aggregation is not None and not test_only,
        Kind.MODEL: place == NO_ROUND and config.cross_site is not None,
        Kind.TRAIN: in_round and not test_only and 0 <= phase < strategy.traits.phases_of(round),
        Kind.EVALUATE: (has_end and may_be_final_round(config, round) and 0 <= phase <= scored)
        or (in_round and phase == HELD_OUT),
    }
    if not asked[task.kind]:
        raise RefusedError(
            f"{name}: the job has no task {task.kind} in round {round} phase {phase}; nothing was sent", Reason.TASK
        )


def may_be_final_round(config: JobConfig, round: int) -> bool:
    """Tell whether the final evaluation may come in `round`: after all rounds, or earlier with early stopping."""
    rounds = config.training.rounds
    return round == rounds or (config.training.validation.patience > 0 and 0 < round <= rounds)
