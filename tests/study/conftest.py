"""A study of cells of a second: tiny SAM at 64 pixels, two generated pictures a site."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import small_config

MakeStudy = Callable[..., Path]


@pytest.fixture
def study_file(tmp_path: Path) -> MakeStudy:
    """Return a maker of studies: study_file(axes={...}) writes the file beside its base job, and returns its path."""
    raw = small_config("fedit", rounds=1, local_steps=1).model_dump()
    raw["data"]["phantoms"] |= {"training": 2, "validation": 0, "test": 1}
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "job.yaml").write_text(yaml.safe_dump(raw, sort_keys=False))

    def write(**sections: Any) -> Path:
        path = tmp_path / "tiny.yaml"
        path.write_text(yaml.safe_dump({"about": "a test", "base": "base", "set": {"sites": 2}} | sections, sort_keys=False))
        return path

    return write
