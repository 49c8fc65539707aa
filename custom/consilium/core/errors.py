"""Errors that a user sees as one line: what is wrong (file, field, value), and the remedy.

Each error has a reason, the only part of it that may leave a site.
"""

from collections.abc import Mapping
from enum import IntEnum, StrEnum

STOPS = (KeyboardInterrupt, SystemExit, GeneratorExit)
"""Exceptions that end a process or generator. All others are failures, even those that are no Exception (a panic in Rust)."""
UNEXPLAINED = "FLARE ended the job"
"""The beginning of a job's reason if FLARE ended it and no person aborted it."""
ABORTED_RUN = "aborted"
"""The beginning of a job's reason if a person aborted it. An alert leaves out runs with this cause."""


class Reason(StrEnum):
    """The reason why a site sends no result. The server gets only this word; the site's own log has the whole text.

    An error's text may name files, and so patients, or contain numbers that no noise protects. So it never leaves.
    """

    JOB = "job"
    TASK = "task"
    POLICY = "policy"
    APPROVAL = "approval"
    BUDGET = "budget"
    LEDGER = "ledger"
    DATA = "data"
    DATASET = "dataset"
    SUMS = "sums"
    STATISTICS = "statistics"
    MODEL = "model"
    CHECKPOINT = "checkpoint"
    TRAINING = "training"
    RESULT = "result"
    CERTIFICATE = "certificate"
    STOPPED = "stopped"
    ERROR = "error"

    @property
    def meaning(self) -> str:
        """The meaning of the reason, in a few words."""
        return _TEXTS[self]

    @property
    def text(self) -> str:
        """The meaning of the reason, for people at the server."""
        return f"{self.meaning}; the site's log says which"


_TEXTS = {
    Reason.JOB: "the job's configuration cannot run there",
    Reason.TASK: "the task is none that the job has at this point",
    Reason.POLICY: "the site's policy forbids the job",
    Reason.APPROVAL: "the site's administrator has not approved this job",
    Reason.BUDGET: "the site's privacy budget does not allow it",
    Reason.LEDGER: "the site's privacy ledger or record cannot be used",
    Reason.DATA: "the site's data cannot be read",
    Reason.DATASET: "the site has no data set as the job names it, or the job names none of several",
    Reason.SUMS: "the site's data were in sums of other hospitals before, without noise",
    Reason.STATISTICS: "the site gives no statistics to this job",
    Reason.MODEL: "the site hands out no personalized model",
    Reason.CHECKPOINT: "the site's base weights or saved state cannot be used",
    Reason.TRAINING: "training failed there",
    Reason.RESULT: "the site's guard let nothing out",
    Reason.CERTIFICATE: "the site's certificate is another one than at the start of this run: its kit was renewed",
    Reason.STOPPED: "the task was stopped",
    Reason.ERROR: "something unexpected failed there",
}


class ExitCode(IntEnum):
    """Exit codes of all commands; provisioning/engineer.md explains them."""

    DONE, FAILED, USAGE, RUNNING, LOST, UNREACHABLE, INTERRUPTED = 0, 1, 2, 3, 4, 5, 130


class ConsiliumError(Exception):
    """Base of every error that is shown to a user as one line instead of a traceback.

    `reason`: the only part that may leave a site. `told`: the text for FLARE's logs at the site if the message may name data,
    "" if FLARE may log the message itself. `exit_code`: of a command that ends with this error.
    """

    reason = Reason.ERROR
    exit_code = ExitCode.FAILED
    told = ""

    def __init__(self, message: str, reason: Reason | None = None, told: str = "") -> None:
        super().__init__(message)
        self.reason, self.told = reason or type(self).reason, told or type(self).told


class ConfigError(ConsiliumError):
    """job.yaml or site.yaml has a setting that cannot run."""

    reason = Reason.JOB
    exit_code = ExitCode.USAGE


def raise_first(problems: Mapping[str, object], kind: type[Exception] = ConfigError, source: object = "") -> None:
    """Raise an error of a `kind` with the first message in `problems` whose value is true, such as a combination of options.

    `source`: the file or the option that the message is about, written before it.
    """
    if found := next((message for message, applies in problems.items() if applies), None):
        raise kind(f"{source}: {found}" if source else found)


class UnreachableError(ConsiliumError):
    """The server does not answer, or does not accept this kit."""

    exit_code = ExitCode.UNREACHABLE


class JobError(ConsiliumError):
    """A job has failed or is lost; `exit_code` tells these apart."""

    def __init__(self, message: str, exit_code: ExitCode) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class DataError(ConsiliumError):
    """A data list, an image or a mask cannot be used. `kind`: the kind of problem, by which a report counts samples."""

    reason = Reason.DATA
    exit_code = ExitCode.USAGE
    told = "the data cannot be used"

    def __init__(self, message: str, kind: str = "unreadable") -> None:
        super().__init__(message)
        self.kind = kind


class UnfitError(DataError):
    """A sample can be read but does not fit the job: its class, its size or its mask.

    In a job with privacy or statistics it counts as an empty sample instead of an error. Otherwise jobs could find out what
    samples contain.
    """


class CheckpointError(ConsiliumError):
    """A weights file or a saved state is missing, damaged or for another model."""

    reason = Reason.CHECKPOINT
    exit_code = ExitCode.USAGE


class RefusedError(ConsiliumError):
    """A message was refused: a result at the server, or a release at a site. Nothing was aggregated or sent."""

    reason = Reason.RESULT
