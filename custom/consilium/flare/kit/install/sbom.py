"""A bill of materials of an environment or a wheelhouse, as CycloneDX 1.6 JSON."""

import re
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageMetadata, distributions

from cyclonedx.contrib.this.builders import this_component
from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import DisjunctiveLicense
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL


def bill(found: Iterable[tuple[Distribution, str]], subject: str) -> str:
    """Return the bill of distributions with their wheels' SHA-256, "" if unknown, as JSON.

    `subject`: the package that the bill of materials describes. Of two distributions of one name the first counts, because
    Python imports it.
    """
    parts: dict[str, Component] = {}
    for one, digest in found:
        metadata = one.metadata  # parsed at each access
        if (name := re.sub(r"[-_.]+", "-", _field(metadata, "Name")).lower()) and name not in parts:  # as PEP 503 has it
            parts[name] = _component(metadata, name, digest)
    about = parts.pop(subject, None)
    bom = Bom(components=parts.values())
    bom.metadata.component = about
    bom.metadata.tools.components.add(this_component())
    if about is not None:
        bom.register_dependency(about, parts.values())
    return JsonV1Dot6(bom).output_as_string(indent=1)


def environment() -> str:
    """Return the bill of the environment of this process."""
    return bill(((one, "") for one in distributions()), "consilium")


def _field(metadata: PackageMetadata, name: str) -> str:
    return metadata[name] if name in metadata else ""  # noqa: SIM401 - some have no `get`, others raise for a missing field


def _component(metadata: PackageMetadata, name: str, digest: str) -> Component:
    version, license = _field(metadata, "Version") or None, _license(metadata)
    url = PackageURL("pypi", None, name, version)
    return Component(
        type=ComponentType.LIBRARY,
        name=_field(metadata, "Name"),
        version=version,
        purl=url,
        bom_ref=str(url),
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=digest)] if digest else (),
        licenses=[DisjunctiveLicense(name=license)] if license else (),
    )


def _license(metadata: PackageMetadata) -> str:
    """Return a package's licence in one line, "" for none. Many packages have the licence's whole text there."""
    classifiers = [text for text in metadata.get_all("Classifier") or [] if text.startswith("License ::")]
    listed = [*(metadata.get_all("License-Expression") or []), *(text.rpartition(" :: ")[2] for text in classifiers)]
    listed += metadata.get_all("License") or []
    return next((text.strip().splitlines()[0][:200] for text in listed if text.strip()), "")
