"""The errors a user meets, one line each: what is wrong (file, field, value), what to do, and what of it may leave a site."""

from enum import IntEnum, StrEnum

STOPS = (KeyboardInterrupt, SystemExit, GeneratorExit)
"""What ends a process or a generator. All else is a failure, also what is not an Exception: a panic of a library in Rust."""


class Reason(StrEnum):
    """All that a site ever tells the server of why there is no result: one of these words. Its own log has the whole text.

    A site's text may name files, and so patients, or numbers that no noise protects; so none of it leaves.
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
    STOPPED = "stopped"
    ERROR = "error"

    @property
    def text(self) -> str:
        """What the word means, for people at the server."""
        return f"{_TEXTS[self]}; the site's log says which"


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
    Reason.STOPPED: "the task was stopped",
    Reason.ERROR: "something unexpected failed there",
}


class ExitCode(IntEnum):
    """Exit codes of all commands; provisioning/engineer.md says what they mean."""

    DONE, FAILED, USAGE, RUNNING, LOST, UNREACHABLE, INTERRUPTED = 0, 1, 2, 3, 4, 5, 130


class ConsiliumError(Exception):
    """Base of every error that is shown to a user as one line instead of a traceback.

    `reason`: what may leave a site of it; `told`: what FLARE's logs there say in the place of a text that may name data, "" of
    others; `exit_code`: of the command that it ends.
    """

    reason = Reason.ERROR
    exit_code = ExitCode.FAILED
    told = ""

    def __init__(self, message: str, reason: Reason | None = None, told: str = "") -> None:
        super().__init__(message)
        self.reason, self.told = reason or type(self).reason, told or type(self).told


class ConfigError(ConsiliumError):
    """job.yaml or site.yaml holds something that cannot run."""

    reason = Reason.JOB
    exit_code = ExitCode.USAGE


class UnreachableError(ConsiliumError):
    """The server does not answer, or does not let this kit in."""

    exit_code = ExitCode.UNREACHABLE


class JobError(ConsiliumError):
    """A job has failed or is lost; `exit_code` says which."""

    def __init__(self, message: str, exit_code: ExitCode) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class DataError(ConsiliumError):
    """A data list, an image or a mask cannot be used. `kind`: what is wrong, as a report counts it."""

    reason = Reason.DATA
    exit_code = ExitCode.USAGE
    told = "the data cannot be used"

    def __init__(self, message: str, kind: str = "unreadable") -> None:
        super().__init__(message)
        self.kind = kind


class UnfitError(DataError):
    """A sample that can be read, and that is not what the job asks for: its class, its size, its mask.

    In a job with privacy or statistics it is an empty sample and no error, or jobs could ask for what samples hold.
    """


class CheckpointError(ConsiliumError):
    """A weights file or a saved state is missing, damaged or for another model."""

    reason = Reason.CHECKPOINT
    exit_code = ExitCode.USAGE


class RefusedError(ConsiliumError):
    """A message was refused: a result at the server, or a release at a site. Nothing was aggregated or sent."""

    reason = Reason.RESULT
