"""What may name a file of the data, and so a patient: where such lines go, and what is told in their place.

FLARE's logs have many readers, and events go there. A site's process has these loggers write to a private file; see
flare/job/private_log.py.
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
"""Loggers of code that reads, shows or trains on samples. Their lines name files, or tell what a record holds."""
PLACES = ("event", "site", "round", "phase", "stage", "what", "reason")
"""What an event of private training may tell: none of these holds a number that follows from the data."""
_log = logging.getLogger(__name__)


def say_to(handler: logging.Handler) -> None:
    """Have what these loggers say go to `handler` only, from now on in this process."""
    for logger in map(logging.getLogger, OF_DATA):
        logger.handlers, logger.propagate = [handler], False


def places(event: Mapping[str, Any]) -> dict[str, Any]:
    """Return what may be told of an event of private training: losses, scores and norms have no noise. All goes to the log."""
    _log.info(json.dumps(dict(event)))
    return {key: event[key] for key in PLACES if key in event}


def keep(text: str) -> None:
    """Log what follows from the data, where such lines belong."""
    _log.info(text)


def undrawn(what: str, error: Exception) -> str:
    """Return what may be told of a thing that could not be shown: its name and the error's kind; the log has the text."""
    _log.warning(f"{what}: {type(error).__name__}: {error}")
    system = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else ""
    return f"{what}: {type(error).__name__}" + (f" ({system})" if system else "")
