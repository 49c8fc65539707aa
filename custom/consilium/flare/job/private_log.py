"""What errors say of the data goes to a private file of the job: FLARE's logs have many readers, so they name no file of it.

A text may name a file or hold a value, and so a patient. In a simulation all of it is the user's own, and stays in the log.
"""

import logging
import traceback
from contextlib import suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path

from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_context import FLContext

from consilium.core.errors import ConsiliumError
from consilium.core.storage import private_folder
from consilium.federation.run_folders import ERRORS
from consilium.flare.job import job_context
from consilium.report.private_logging import say_to

MOST = 1_000_000
"""Bytes of a job's file; there is one former file beside it."""


class PrivateFile(RotatingFileHandler):
    """A job's file under `errors` in the kit's folder of ours, for its own user alone. `lost`: a text could not be written."""

    lost = False

    def __init__(self, fl_ctx: FLContext) -> None:
        folder = private_folder(job_context.state_folder(fl_ctx) / ERRORS)
        name = Path(str(fl_ctx.get_job_id())).name  # a server chose it
        how = {"delay": True, "encoding": "utf-8", "errors": "backslashreplace"}  # a file's name may be no text
        super().__init__(folder / f"{name}.log", maxBytes=MOST, backupCount=1, **how)  # type: ignore[arg-type]
        self.setFormatter(logging.Formatter("%(asctime)s - %(levelname)s - %(message)s"))

    def handleError(self, record: logging.LogRecord) -> None:
        """Say nothing: Python would print the text, and with it what must not be printed."""
        self.lost = True


def keep_apart(fl_ctx: FLContext) -> None:
    """Have what the data's own code says of single samples written to the job's file, from now on in this process."""
    if not job_context.simulated():
        say_to(logging.NullHandler())
        with suppress(OSError):  # a full disk: then nobody is told, and what fails says that it could not be kept
            say_to(PrivateFile(fl_ctx))


def log_failure(component: FLComponent, fl_ctx: FLContext, error: BaseException, what: str = "unexpected error") -> None:
    """Log why there is no answer: an error of settings as it is, one of the data or an unexpected one by its kind only."""
    expected = isinstance(error, ConsiliumError)
    told = error.told if isinstance(error, ConsiliumError) else f"{what} ({type(error).__name__})"
    text = "\n".join([str(error), *getattr(error, "__notes__", ())])
    if expected and (job_context.simulated() or not told):
        component.log_error(fl_ctx, text)
    elif job_context.simulated():
        component.log_exception(fl_ctx, what)
    else:
        kept = text if expected else "".join(traceback.format_exception(error))
        component.log_error(fl_ctx, f"{told}; {_kept(fl_ctx, kept)}")


def _kept(fl_ctx: FLContext, text: str) -> str:
    """Write a text to the job's file and return where it is."""
    try:
        file = PrivateFile(fl_ctx)
        file.emit(logging.makeLogRecord({"msg": text, "levelno": logging.ERROR, "levelname": "ERROR"}))
        file.close()
    except Exception as error:  # an answer must follow, whatever is the matter with the disk or FLARE's context
        return f"the text could not be kept ({type(error).__name__})"
    return "the text could not be kept" if file.lost else f"the text is in {file.baseFilename}"
