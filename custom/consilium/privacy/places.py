"""Which tasks a job has, of what kind, in which round and phase; and what a site calls the run they belong to."""

import re

from consilium.config.job import JobConfig
from consilium.errors import Reason, RefusedError
from consilium.messages import HELD_OUT, Kind
from consilium.privacy.authorized import Task
from consilium.privacy.lending import MODELS
from consilium.strategies.strategy import Strategy

ASIDE = (-1, -1)
"""Where a task stands that belongs to no round."""


def own_run(name: str, run: str, digest: str, job_id: str) -> str:
    """Return the site's folder for a run of the job with this `digest`: the server's word alone is not enough.

    Raises RefusedError for one that is none.
    """
    if not re.fullmatch(r"[A-Za-z0-9-]{0,64}", run) or not (run or job_id):
        raise RefusedError(f"{name}: {run[:80]!r} is no name of a run; nothing was sent", Reason.TASK)
    return f"{run or f'job-{job_id}'}.{digest[:16]}"


def check_place(name: str, config: JobConfig, strategy: Strategy, task: Task, test_only: bool) -> None:
    """Raise RefusedError unless the job asks for this kind of task there. `test_only`: the site never trains."""
    if not _asks(config, strategy, task.kind, task.place, test_only):
        what = "the job has no task {} in round {} phase {}; nothing was sent".format(task.kind, *task.place)
        raise RefusedError(f"{name}: {what}", Reason.TASK)


def _asks(config: JobConfig, strategy: Strategy, kind: Kind, place: tuple[int, int], test_only: bool) -> bool:
    (round, phase), rounds = place, config.training.rounds
    known = config.trains and 0 <= round < rounds
    scored = MODELS if config.cross_site and config.cross_site.personalized else 0
    return {
        Kind.HELLO: place == ASIDE,
        Kind.STATISTICS: place == ASIDE and config.statistics is not None and config.cross_site is None,
        Kind.MASKS: place == ASIDE and config.trains and config.secure_aggregation is not None and not test_only,
        Kind.MODEL: place == ASIDE and config.cross_site is not None,
        Kind.TRAIN: known and not test_only and 0 <= phase < strategy.phases(round),
        Kind.EVALUATE: ((config.trains or config.cross_site is not None) and round == rounds and 0 <= phase <= scored)
        or (known and phase == HELD_OUT),
    }[kind]
