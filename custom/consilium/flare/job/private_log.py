"""A private file for error texts about a site's data.

An error's text may contain a file name or a value, and so identify a patient. FLARE's logs have many readers, so such texts go
to a file that only the site's user can read. In a simulation all data belongs to the user, and the texts stay in the log.
"""

import logging
import traceback
from contextlib import suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path

from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_context import FLContext

from consilium.core.errors import ConsiliumError
from consilium.core.storage import make_private_folder
from consilium.federation.run_folders import ERRORS
from consilium.flare.job import job_context
from consilium.report.private_logging import route_data_logs

MAX_BYTES = 1_000_000
"""Largest size of a job's file in bytes. One rotated file is kept beside it."""


class PrivateFile(RotatingFileHandler):
    """A job's private file, in the folder `errors` of our folder in the kit. `lost`: whether writing a text has failed."""

    lost = False

    def __init__(self, fl_ctx: FLContext) -> None:
        folder = make_private_folder(job_context.state_folder(fl_ctx) / ERRORS)
        name = Path(str(fl_ctx.get_job_id())).name  # the server chose the id
        super().__init__(
            folder / f"{name}.log", maxBytes=MAX_BYTES, backupCount=1, delay=True, encoding="utf-8", errors="backslashreplace"
        )  # a file's name may be no valid text
        self.setFormatter(logging.Formatter("%(asctime)s - %(levelname)s - %(message)s"))

    def handleError(self, record: logging.LogRecord) -> None:
        """Set `lost`. Python's own method would print the text."""
        self.lost = True


def route_to_private_log(fl_ctx: FLContext) -> None:
    """From now on in this process, write log lines of the code that reads samples to the job's private file."""
    if not job_context.is_simulated_process():
        route_data_logs(logging.NullHandler())
        with suppress(OSError):  # a full disk: the texts are lost, and `log_failure` says so
            route_data_logs(PrivateFile(fl_ctx))


def log_failure(component: FLComponent, fl_ctx: FLContext, error: BaseException, what: str = "unexpected error") -> None:
    """Log why a task failed.

    The text of an error about settings goes to FLARE's log. Of an error about the data, or an unexpected one, FLARE's log gets
    only the kind, and the private file gets the text. In a simulation FLARE's log gets all texts.
    """
    expected = isinstance(error, ConsiliumError)
    told = error.told if isinstance(error, ConsiliumError) else f"{what} ({type(error).__name__})"
    text = "\n".join([str(error), *getattr(error, "__notes__", ())])
    if expected and (job_context.is_simulated_process() or not told):
        component.log_error(fl_ctx, text)
    elif job_context.is_simulated_process():
        component.log_exception(fl_ctx, what)
    else:
        try:
            file = PrivateFile(fl_ctx)
            private = text if expected else "".join(traceback.format_exception(error))
            file.emit(logging.makeLogRecord({"msg": private, "levelno": logging.ERROR, "levelname": "ERROR"}))
            file.close()
            where = "the text could not be kept" if file.lost else f"the text is in {file.baseFilename}"
        except Exception as problem:  # the site must reply even if the disk or FLARE's context fails
            where = f"the text could not be kept ({type(problem).__name__})"
        component.log_error(fl_ctx, f"{told}; {where}")
