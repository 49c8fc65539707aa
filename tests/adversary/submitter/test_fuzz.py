"""Whatever stands in a job.yaml or a site.yaml, reading it ends within seconds, in a configuration or in clear lines."""

from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from consilium.config.job import load_job
from consilium.config.site import load_site
from consilium.core.errors import ConfigError, ConsiliumError
from consilium.federation.job_assembly import assemble_job
from tests.adversary.fuzzing import PLAIN, attack, fuzzed
from tests.conftest import JOBS

JSON = st.recursive(
    st.one_of(PLAIN, st.sampled_from(["fedit", "sam", "lora", "tiny", ".nan", "1e400", "((a+)+)+$"])),
    lambda below: st.one_of(
        st.lists(below, max_size=3), st.dictionaries(st.one_of(st.text(max_size=8), PLAIN), below, max_size=3)
    ),
    max_leaves=6,
)
BASES = [yaml.safe_load(path.read_text()) for path in sorted(JOBS.glob("quickstart*/app/config/job.yaml"))]
SITE = {
    "datalist": "d.json",
    "device": "cpu",
    "privacy": {"dataset": "w", "budgets": {"site": {"epsilon": 3}}, "trust": ["local"]},
}


def places(values: Any, above: tuple = ()) -> list[tuple]:
    """Return the way to every value in nested maps."""
    if not isinstance(values, dict):
        return [above]
    return [above, *(one for key, value in values.items() for one in places(value, (*above, key)))]


def changed(values: Any, place: tuple, value: Any) -> Any:
    """Return nested maps with another value at one place."""
    if not place:
        return value
    return values | {place[0]: changed(values[place[0]], place[1:], value)}


def survives(path: Path, load: Any) -> None:
    """Let it end, or refuse in lines that a terminal shows as they are."""
    try:
        load(path)
    except ConsiliumError as error:
        assert isinstance(error, ConfigError)  # noqa: PT017
        assert all(line.isprintable() for line in str(error).splitlines())  # noqa: PT017
        assert len(str(error)) < 20_000  # noqa: PT017


def write(path: Path, values: Any) -> bool:
    try:
        path.write_text(yaml.safe_dump(values), encoding="utf-8")
    except (yaml.YAMLError, UnicodeEncodeError):
        return False
    return True


@fuzzed
def test_job_files(cases: int, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"

    def body(base: dict, data: st.DataObject, value: Any) -> None:
        place = data.draw(st.sampled_from(places(base)))
        if write(path, changed(base, place, value)):
            survives(path, lambda path: assemble_job(load_job(path), path))

    attack(cases, body, base=st.sampled_from(BASES), data=st.data(), value=JSON)


@fuzzed
def test_site_files(cases: int, tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"

    def body(data: st.DataObject, value: Any) -> None:
        if write(path, changed(SITE, data.draw(st.sampled_from(places(SITE))), value)):
            survives(path, load_site)

    attack(cases, body, data=st.data(), value=JSON)


@fuzzed
def test_files_of_bytes(cases: int, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    good = (JOBS / "quickstart/app/config/job.yaml").read_bytes()

    def body(where: float, piece: bytes) -> None:
        at = int(where * len(good))
        path.write_bytes(good[:at] + piece + good[at + len(piece) :])
        survives(path, load_job)

    attack(cases, body, where=st.floats(0, 1), piece=st.binary(max_size=6))
