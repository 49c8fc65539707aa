"""What other parties wrote, made fit to be shown: names and reasons may hold escape codes, new lines or markup.

Records (metrics.jsonl, audit.jsonl) keep texts as they came, JSON escapes them. Whoever shows one calls a function of these.
"""

import re
import unicodedata
from functools import lru_cache

from rich.text import Text

LIMIT = 300
"""Characters of one text that are shown, unless the caller wants another number."""
LONGEST_LINE = 4000
"""The most characters of a printed line."""
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode categories without a shape of their own: controls, format (text direction), surrogates, private, line ends."""
_MARKDOWN = {c: f"\\{c}" for c in "\\|`#[]*~!$"} | {"<": "&lt;", ">": "&gt;", "&": "&amp;"}


def shown(text: object, limit: int = LIMIT) -> str:
    """Return a text as one line of visible characters, the others as escapes such as \\x1b; at most `limit` of its own."""
    whole = str(text) if not isinstance(text, int) or abs(text) < 10**20 else "a number of over 20 digits"
    escaped = (c.encode("unicode_escape", "surrogatepass").decode("ascii") for c in whole[:limit])
    visible = "".join(e if unicodedata.category(c) in _HIDDEN else c for c, e in zip(whole, escaped, strict=False))
    return visible if len(whole) <= limit else f"{visible}... ({len(whole)} characters)"


def cell(text: object, limit: int = LIMIT) -> str:
    """Return a text as one cell or heading of a Markdown page: as `shown`, and nothing in it is markup."""
    plain = "".join(_MARKDOWN.get(c, c) for c in shown(text, limit))
    return re.sub(r"(?<![^\W_])_|_(?![^\W_])", r"\\_", plain)  # one amid a word is none


def harmless(value: object) -> object:
    """Return a value for a cell of CSV, "" for None; a text that a spreadsheet would take for a formula gets an apostrophe."""
    if not isinstance(value, str):
        return "" if value is None else value
    return f"'{value}" if re.match(r"[=+\-@\t\r\n]", value) else value


def line(text: object, style: str = "", limit: int = LIMIT) -> Text:
    """Return a text for a rich console or table: as `shown`, and neither [markup] nor :emoji: in it counts."""
    return Text(shown(text, limit), style)


def number_of(count: int, what: str) -> str:
    """Return a number with its noun."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def tag(text: object) -> str:
    """Return a text as a name in TensorBoard, which makes folders of it: as `shown`, and no part of it leads elsewhere."""
    return _known_tag(text) if type(text) is str and len(text) <= LIMIT else _tag(text)


def _tag(text: object) -> str:
    return re.sub(r"(^|/)\.+", r"\1_", re.sub(r"[^\w/. -]", "_", shown(text)))


_known_tag = lru_cache(1024)(_tag)  # a site reports the same names in every round
