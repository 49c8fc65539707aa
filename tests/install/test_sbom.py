"""A bill of materials of whatever lies in an environment is valid CycloneDX, and counts each package once."""

import json
from importlib.metadata import distributions
from pathlib import Path

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from consilium.flare.kit.install.sbom import bill

ODD = {
    "A_b.c-1.0": "Name: A_b.c\nVersion: 1.0\nLicense: " + "x" * 500 + "\n",
    "a-b-c-2.0": "Name: a-b-c\nVersion: 2.0\n",
    "none-1.0": "Version: 1.0\n",
    "bare-0": "Name: bare\n",
    "odd-1.0": "Name: odd\nVersion: 1.0 \x1b[31m%2F\nLicense-Expression: MIT\nClassifier: License :: X :: BSD\n",
}


def test_odd_packages(tmp_path: Path) -> None:
    for name, text in ODD.items():
        (tmp_path / f"{name}.dist-info").mkdir()
        (tmp_path / f"{name}.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.4\n{text}")
    written = bill([(one, "") for one in distributions(path=[str(tmp_path)])], "consilium")
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(written) is None
    found = {part["name"]: part for part in json.loads(written)["components"]}
    assert len(found) == 3
    assert found.keys() - {"A_b.c", "a-b-c"} == {"bare", "odd"}
    assert found["odd"]["licenses"] == [{"license": {"name": "MIT"}}]
