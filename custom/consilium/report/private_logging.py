"""Keep log lines that may name a data file, and so a patient, out of FLARE's logs, which many people read.

At a site, the loggers in OF_DATA write to a private file; see flare/job/private_log.py. Events, which go to FLARE's logs, get
only what may be public.
"""

import json
import logging
import os
from collections.abc import Mapping
from typing import Any

OF_DATA = (
    "consilium.data",
    "consilium.tasks",
    "consilium.report",
    "consilium.client.site_data",
    "consilium.privacy.dpsgd",
    "consilium.privacy.secagg.arithmetic",
)
"""Loggers of code that reads, shows or trains on samples. Their lines may name files or quote a record."""
PLACES = ("event", "site", "round", "phase", "stage", "what", "reason")
"""Fields of an event of private training that may be public. None has a number that depends on the data."""
_log = logging.getLogger(__name__)


def route_data_logs(handler: logging.Handler) -> None:
    """Send the lines of the loggers in OF_DATA to `handler` only, from now on in this process."""
    for logger in map(logging.getLogger, OF_DATA):
        logger.handlers, logger.propagate = [handler], False


def log_event_privately(event: Mapping[str, Any]) -> dict[str, Any]:
    """Return the public fields of an event of private training, and log all of it privately.

    Losses, scores and norms are left out, because they have no noise.
    """
    _log.info(json.dumps(dict(event)))
    return {key: event[key] for key in PLACES if key in event}


def log_failed_drawing(what: str, error: Exception) -> str:
    """Return a public line on a picture or file that failed: its name and the error's type. Log the error privately."""
    _log.warning(f"{what}: {type(error).__name__}: {error}")
    system = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else ""
    return f"{what}: {type(error).__name__}" + (f" ({system})" if system else "")
