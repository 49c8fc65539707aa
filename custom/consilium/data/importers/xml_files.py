"""Reading of XML files of data sets with bounded memory and time, for the importers of nuclei and of MedQuAD."""

from pathlib import Path
from xml.etree import ElementTree

from consilium.core.errors import DataError
from consilium.data.importers.base import GIVE
from consilium.data.safe_open import check_file

MOST_DRAWN = 2**25
"""Bytes of a file with outlines. MoNuSeg's largest have a few MB."""
MOST_WRITTEN = 2**22
"""Bytes of a file with texts. MedQuAD's files are one web page each, of at most a few hundred kB."""
MOST_NODES = 2**21
"""Elements and attributes of a file. Each may take up to 400 bytes of memory although it has only 4 bytes in the file."""
DEEPEST = 64
"""Elements within each other. An importer searches below each element, so that time grows with the depth."""


class _BoundedBuilder(ElementTree.TreeBuilder):
    """Build a tree within bounds. Without `keeps_text`, the texts between tags are left out."""

    def __init__(self, keeps_text: bool) -> None:
        super().__init__()
        self.keeps_text, self.nodes, self.depth = keeps_text, 0, 0

    def doctype(self, name: str, pubid: str | None, system: str | None) -> None:
        raise ValueError("it declares a document type, whose entities can expand to gigabytes")

    def start(self, tag: str, attrs: dict[str, str], /) -> ElementTree.Element:  # type: ignore[override]
        self.nodes, self.depth = self.nodes + 1 + len(attrs), self.depth + 1
        if self.nodes > MOST_NODES:
            raise ValueError(f"it has over {MOST_NODES:,} elements and attributes")
        if self.depth > DEEPEST:
            raise ValueError(f"its elements are nested over {DEEPEST} deep")
        return super().start(tag, attrs)

    def end(self, tag: str, /) -> ElementTree.Element:
        self.depth -= 1
        return super().end(tag)

    def data(self, data: str, /) -> None:
        if self.keeps_text:
            super().data(data)


def read_xml(path: Path, expected: str, keeps_text: bool) -> ElementTree.Element:
    """Return the root of an XML file. `expected`: what the file should hold, for the message. `keeps_text`: see above.

    Raises DataError for a damaged file, a document type, and beyond MOST_DRAWN (with texts: MOST_WRITTEN), MOST_NODES, DEEPEST.
    """
    check_file(path, GIVE, MOST_WRITTEN if keeps_text else MOST_DRAWN)
    try:
        return ElementTree.parse(path, ElementTree.XMLParser(target=_BoundedBuilder(keeps_text))).getroot()
    except (OSError, ValueError, LookupError, ElementTree.ParseError) as error:  # LookupError: an unknown encoding
        raise DataError(f"{path}: expected {expected}; found otherwise ({error}); {GIVE}") from None
