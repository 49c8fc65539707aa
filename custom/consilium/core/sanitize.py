"""Makes texts from other parties safe to show. Names and reasons may contain escape codes, line breaks or markup.

Records (metrics.jsonl, audit.jsonl) hold such texts unchanged, escaped as JSON. Code that shows one calls a function of this
module.
"""

import re
import unicodedata
from collections.abc import Sequence

from rich.text import Text

LIMIT = 300
"""The largest number of characters of a text that are shown by default."""
LONGEST_LINE = 4000
"""The largest number of characters of a printed line."""
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode categories without a visible shape: control, format (text direction), surrogate, private, unassigned, line ends."""
INVISIBLE = frozenset({*"\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0", *map(chr, range(0x180B, 0x1810))})
INVISIBLE |= {*map(chr, range(0xFE00, 0xFE10)), *map(chr, range(0xE0100, 0xE01F0))}
"""Characters of other categories without a shape: fillers, joiners and variation selectors."""
_MARKDOWN = {c: f"\\{c}" for c in "\\|`#[]*~!$"} | {"<": "&lt;", ">": "&gt;", "&": "&amp;"}


def shown(text: object, limit: int = LIMIT) -> str:
    """Return a text as one line of visible characters, cut to `limit`. Hidden characters become escapes such as \\x1b.

    Blanks of other widths become ordinary ones, and letters without a shape become escapes, too.
    """
    whole = str(text) if not isinstance(text, int) or abs(text) < 10**20 else "a number of over 20 digits"
    visible = ""
    for character in whole[:limit]:
        category = unicodedata.category(character)
        if category in _HIDDEN or character in INVISIBLE:
            visible += character.encode("unicode_escape", "surrogatepass").decode("ascii")
        else:
            visible += " " if category == "Zs" else character
    return visible if len(whole) <= limit else f"{visible}... ({len(whole)} characters)"


def markdown_cell(text: object, limit: int = LIMIT) -> str:
    """Return a text for a table cell or heading of a Markdown page: `shown`, with markup escaped."""
    plain = "".join(_MARKDOWN.get(c, c) for c in shown(text, limit))
    return re.sub(r"(?<![^\W_])_|_(?![^\W_])", r"\\_", plain)  # an underscore inside a word is not markup


def csv_cell(value: object) -> object:
    """Return a value for a CSV cell, "" for None. A text that a spreadsheet would read as a formula gets an apostrophe."""
    if not isinstance(value, str):
        return "" if value is None else value
    return f"'{value}" if re.match(r"[=+\-@\t\r\n]", value) else value


def rich_line(text: object, style: str = "", limit: int = LIMIT) -> Text:
    """Return a text for a rich console or table: `shown`, without interpreting [markup] or :emoji:."""
    return Text(shown(text, limit), style)


def first_names_text(names: Sequence[str], most: int = 4) -> str:
    """Return the first `most` names as a text, and the number of the others."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def count_with_noun(count: int, what: str) -> str:
    """Return a number with its noun, in the plural unless the number is 1."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def tensorboard_tag(text: object) -> str:
    """Return a text as a tag for TensorBoard: `shown`, without path parts that lead out of its folder."""
    return re.sub(r"(^|/)\.+", r"\1_", re.sub(r"[^\w/. -]", "_", shown(text)))
