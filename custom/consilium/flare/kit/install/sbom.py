"""A bill of materials: all packages of an environment or a wheelhouse, as CycloneDX 1.6 JSON."""

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
    """Return the JSON of what is there: each package with its wheel's SHA-256, "" where that is not known.

    `subject` names the package among them that the bill is about. A package that is there twice counts once: the first, which
    is what Python imports.
    """
    parts: dict[str, Component] = {}
    for one, digest in found:
        said = one.metadata  # read anew at each look
        if (name := _normal(_told(said, "Name"))) and name not in parts:
            parts[name] = _component(said, name, digest)
    about = parts.pop(subject, None)
    bom = Bom(components=parts.values())
    bom.metadata.component = about
    bom.metadata.tools.components.add(this_component())
    if about is not None:
        bom.register_dependency(about, parts.values())
    return JsonV1Dot6(bom).output_as_string(indent=1)


def environment() -> str:
    """Return the bill of all that is installed beside this process."""
    return bill(((one, "") for one in distributions()), "consilium")


def _normal(name: str) -> str:
    """Return a package's name as the index has it, by the specification of names (formerly PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _told(said: PackageMetadata, what: str) -> str:
    return said[what] if what in said else ""  # noqa: SIM401 - some metadata have no `get`, others raise for what is not there


def _component(said: PackageMetadata, name: str, digest: str) -> Component:
    told, url = _license(said), PackageURL("pypi", None, name, _told(said, "Version") or None)
    return Component(
        type=ComponentType.LIBRARY,
        name=_told(said, "Name"),
        version=_told(said, "Version") or None,
        purl=url,
        bom_ref=str(url),
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=digest)] if digest else (),
        licenses=[DisjunctiveLicense(name=told)] if told else (),
    )


def _license(said: PackageMetadata) -> str:
    """Return what a package says in a line of its licence, "" where it says nothing; many give the whole text."""
    listed = said.get_all("Classifier") or []
    classified = [text.rpartition(" :: ")[2] for text in listed if text.startswith("License ::")]
    told = [*(said.get_all("License-Expression") or []), *classified, *(said.get_all("License") or [])]
    return next((text.strip().splitlines()[0][:200] for text in told if text.strip()), "")
