"""Frozen models, built from their configuration. Nothing here depends on a federation."""

import importlib.util
import logging
import sys
from types import ModuleType


def _allow_segment_anything_without_torchvision() -> None:
    """Put an empty `segment_anything` package into sys.modules if torchvision is not installed.

    The package's own __init__ imports its mask generator, which needs torchvision; the model code does not.
    """
    if "segment_anything" in sys.modules or importlib.util.find_spec("torchvision"):
        return
    spec = importlib.util.find_spec("segment_anything")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("segment-anything is not installed; run: pip install segment-anything")
    package = ModuleType("segment_anything")
    package.__path__ = list(spec.submodule_search_locations)
    package.__spec__ = spec
    sys.modules["segment_anything"] = package


_allow_segment_anything_without_torchvision()
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # PEFT imports it, and it warns about a kernel that we never use
