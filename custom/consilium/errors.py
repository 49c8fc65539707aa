"""The errors a user meets. Each carries one line: what is wrong (file, field, value) and what to do."""


class ConsiliumError(Exception):
    """Base of every error that is shown to a user as one line instead of a traceback."""


class ConfigError(ConsiliumError):
    """job.yaml or site.yaml holds something that cannot run."""


class DataError(ConsiliumError):
    """A data list, an image or a mask cannot be used."""


class CheckpointError(ConsiliumError):
    """A weights file or a saved state is missing, damaged or of another model."""


class RefusedError(ConsiliumError):
    """A message was refused: a result at the server, or a release at a site. Nothing was aggregated or sent."""
