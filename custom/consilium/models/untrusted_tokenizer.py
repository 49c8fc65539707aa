"""Limits on the tokenizer of a model folder. Its tokenizer.json is an untrusted program that processes every record.

Without limits it could write millions of tokens for one letter, search for minutes, or fail for one kind of record only. Such a
failure would reveal which site has these records. `check_tokenizer_json` accepts the kinds of step that published tokenizers
have, with limits. `replace_tokenizer_errors` turns the remaining failures into one error. `models/untrusted_folder.py` calls
the first; `tasks/language` and the embeddings encode within the second.
"""

import base64
import binascii
import json
import re
import struct
import unicodedata
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from consilium.core.errors import STOPS, CheckpointError, ConsiliumError

GROWTH = 32
"""Largest number of characters that a tokenizer may make from one, not counting Unicode normalization. SentencePiece tokenizers
make up to 18, from the Arabic ligature U+FDFA."""
STEPS = 64
"""Largest number of normalizers of a tokenizer; the same for pre-tokenizers, decoders and post-processors."""
LONGEST_WORD = 256
"""Largest number of characters of a text in a step's settings, such as a special token."""
LONGEST_PATTERN = 4096
LONGEST_PIECE = 128
"""Characters of a Unigram token: every place of a text is searched for all of them."""
LONGEST_UNKNOWN = 200
"""Characters of a word that WordPiece searches, in a time that grows with the square; BERT has 100."""
_REMEDY = "use the tokenizer that the model's publisher ships"
_MODELS = ("BPE", "WordPiece", "WordLevel", "Unigram")
_STEPS = {
    "normalizer": (
        "BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled", "Prepend", "Replace",
        "Strip", "StripAccents",
    ),
    "pre_tokenizer": (
        "BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits", "FixedLength", "Metaspace", "Punctuation", "Split",
        "UnicodeScripts", "Whitespace", "WhitespaceSplit",
    ),
    "post_processor": ("BertProcessing", "ByteLevel", "RobertaProcessing", "TemplateProcessing"),
    "decoder": ("BPEDecoder", "ByteFallback", "ByteLevel", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece"),
}  # fmt: skip
"""The kinds of step, by where they stand in a tokenizer.json. Each may also be a Sequence of them."""
_PARTS = ("normalizers", "pretokenizers", "processors", "decoders")
_ONCE = frozenset({"BertNormalizer", "ByteLevel", "Metaspace", "Precompiled"})
"""Steps that lengthen texts, and would lengthen them again and again."""
_CASES = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])?", ""
_CAPITALS = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_NOT_HAN = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
_ASCII = r"[^\r\n\p{L}\p{N}]?((?=[\p{L}])([^a-z]))*((?=[\p{L}])([^A-Z]))+"
_KNOWN = frozenset(
    {
        *(words + case for words in (_CAPITALS, _NOT_HAN, _ASCII) for case in _CASES),
        r"[^\r\n\p{L}\p{N}]?((?=[\p{L}])([^a-z]))+((?=[\p{L}])([^A-Z]))*",  # of Mistral's Tekken and its likes
        r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+",  # EXAONE
        *(rf"\s*{end}" for end in (r"[\r\n]+", r"[\r\n]", "[\r\n]+", "[\r\n]", r"\r?\n")),
        *(rf"\s{some}(?!\S)" for some in ("+", "*", *(f"{{{2**k}}}" for k in range(10)), "{1,2}")),
        r"\p{N}{1,3}+", r"\s++$", "<sentinel:[0-9]+>", "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
        r"\s+(?=\S)", r"\s+$", r"^\s+", " +▁", "^▁+$", "▁+$", " +$",
        r"\d{1,3}(?=(?:\d{3})*\b)", r"\p{N}{1,3}(?=(?:\p{N}{3})*\b)", r"(?=(\d{3})+(?!\d))",
        r"\p{N}{1,3}(?=(?:\p{N}{3})*(?:\P{N}|$))", r"(?<=\d)(?=(?:\d{3})+(?!\d))", r"\b", r"(?<=\d)(?=\D)",
    }
)  # fmt: skip
"""Alternatives of published patterns that step back at most over one run of letters, digits or blanks."""
_ESCAPE = re.compile(
    r"\\(?:[pP]\{\^?\w{1,32}\}|[sSdDwWhHrntfv]|x[0-9A-Fa-f]{2}|x\{[0-9A-Fa-f]{1,6}\}|u[0-9A-Fa-f]{4}|[^\w\s])", re.ASCII
)
_TIMES = re.compile(r"\{(\d{1,3})(?:(,)(\d{0,3}))?\}|([?*+])\+?")
_MOST_TIMES = 16


@contextmanager
def replace_tokenizer_errors() -> Iterator[None]:
    """Within the context, turn any error of a tokenizer into CheckpointError, without quoting the text.

    A panic of the library, such as for a search with too many steps, is not an Exception and would end the process silently.
    """
    try:
        yield
    except (*STOPS, ConsiliumError):
        raise
    except BaseException as error:
        raise CheckpointError(f"model.checkpoint: its tokenizer fails for a text ({type(error).__name__}); {_REMEDY}") from None


def check_tokenizer_json(program: Mapping[str, Any], where: str) -> None:
    """Raise CheckpointError unless a tokenizer.json, read from the file `where`, has only listed steps within the limits."""
    model = program.get("model")  # vocabulary and merging
    try:
        if not isinstance(model, dict):
            raise ValueError(f"model: {quoted(model)} is not a map")
        if "type" in model and model["type"] not in _MODELS:  # versions before 2021 wrote no type
            raise ValueError(f"model.type: {quoted(model['type'])} is none of {', '.join(_MODELS)}")
        if model.get("dropout"):
            what = "draws tokens anew for every text, only null is possible"
            raise ValueError(f"model.dropout: {quoted(model['dropout'])} {what}")
        most = model.get("max_input_chars_per_word", 100)
        if type(most) is not int or not 0 < most <= LONGEST_UNKNOWN:
            raise ValueError(f"model.max_input_chars_per_word: {quoted(most)}, at most {LONGEST_UNKNOWN} are possible")
        for key in ("unk_token", "continuing_subword_prefix", "end_of_word_suffix"):
            if not (model.get(key) is None or (isinstance(model[key], str) and len(model[key]) <= LONGEST_WORD)):
                raise ValueError(f"model.{key}: {quoted(model[key])} is not a text of at most {LONGEST_WORD} characters")
        pieces = model.get("vocab")
        for piece in pieces if isinstance(pieces, list) else ():
            if not (isinstance(piece, list) and piece and isinstance(piece[0], str) and len(piece[0]) <= LONGEST_PIECE):
                raise ValueError(f"model.vocab: {quoted(piece)} is not a token of at most {LONGEST_PIECE} characters")
        _check_steps(program)
    except ValueError as error:
        raise CheckpointError(f"model.checkpoint: {where}: {error}; {_REMEDY}") from None


def check_backend(tokenizer: Any, where: str) -> None:
    """Raise CheckpointError unless a tokenizer made from the folder `where` has only listed steps within the limits.

    A class of `transformers` may have replaced the file's steps by its own, or may not use the `tokenizers` library.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise CheckpointError(
            f"model.checkpoint: {where}: tokenizer_class: {type(tokenizer).__name__} is not a tokenizer with a tokenizer.json; "
            "give a folder with tokenizer.json"
        )
    steps = {name: getattr(backend, name) for name in _STEPS}
    try:
        _check_steps({name: None if step is None else json.loads(step.__getstate__()) for name, step in steps.items()})
        if getattr(backend.model, "dropout", None):
            raise ValueError(
                f"model.dropout: {backend.model.dropout!r} draws tokens anew for every text, only null is possible"
            )
    except ValueError as error:
        raise CheckpointError(f"model.checkpoint: {where}: {error}; {_REMEDY}") from None


def _check_steps(program: Mapping[str, Any]) -> None:
    """Raise ValueError for a step that is not listed, or for steps that let a text grow without bound."""
    lengthening = list[str]()
    for place, kinds in _STEPS.items():
        steps, growth = list(_flat_steps(program.get(place), place)), 1.0
        if len(steps) > STEPS:
            raise ValueError(f"{place}: {len(steps)} steps, at most {STEPS} are possible")
        for where, step in steps:
            kind = step.get("type")
            if kind not in kinds:
                raise ValueError(f"{where}.type: {quoted(kind)} is none of {', '.join(kinds)}")
            if kind in _ONCE and place in ("normalizer", "pre_tokenizer"):
                if kind in lengthening:
                    raise ValueError(f"{where}.type: {kind!r} is there twice, and lengthens texts each time")
                lengthening.append(kind)
            growth *= _checked_growth(step, where)
            if growth > GROWTH:
                raise ValueError(
                    f"{where}: with the steps before it may write {growth:.0f} characters for one, at most {GROWTH}"
                )


def _flat_steps(step: Any, where: str, depth: int = 0) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (location, step) for all steps in one entry, which may be a nested Sequence."""
    if step is None:
        return
    if not isinstance(step, dict) or depth > 4:
        raise ValueError(f"{where}: {quoted(step)} is not a step")
    if step.get("type") != "Sequence":
        yield where, step
        return
    for key in _PARTS:
        parts = step.get(key, [])
        if not isinstance(parts, list):
            raise ValueError(f"{where}.{key}: {quoted(parts)} is not a list of steps")
        for number, part in enumerate(parts):
            yield from _flat_steps(part, f"{where}.{key}[{number}]", depth + 1)


def _checked_growth(step: Mapping[str, Any], where: str) -> float:
    """Return how many characters a step may make from one. Raises ValueError if its pattern may be slow, see `why_slow`."""
    kind = step["type"]
    if kind == "Precompiled":
        return _longest_replacement(step.get("precompiled_charsmap"), f"{where}.precompiled_charsmap")
    grown = 1.0
    for key, value in step.items():
        if key == "pattern":
            least = _checked_match_length(value, f"{where}.pattern")
            content = step.get("content", "")
            if isinstance(content, str) and content != unicodedata.normalize("NFKD", content):
                raise ValueError(f"{where}.content: {quoted(content)} is lengthened again by Unicode's forms")
            grown = max(1.0, len(content) / least) if isinstance(content, str) else 1.0
        else:
            _check_text_lengths(value, f"{where}.{key}")
    if kind == "Strip" and step.get("stop"):
        raise ValueError(f"{where}.stop: {quoted(step['stop'])}, only 0 is possible")  # the library fails for a shorter token
    if kind == "FixedLength" and not (type(step.get("length")) is int and step["length"] > 0):
        raise ValueError(f"{where}.length: {quoted(step.get('length'))} is not a number of characters")
    return grown


def _check_text_lengths(value: Any, where: str) -> None:
    """Raise ValueError for a long text or a long list anywhere in a step's settings."""
    if isinstance(value, str) and len(value) > LONGEST_WORD:
        raise ValueError(f"{where}: {quoted(value)} of over {LONGEST_WORD} characters")
    if isinstance(value, dict | list):
        if len(value) > STEPS:
            raise ValueError(f"{where}: {len(value)} entries, at most {STEPS} are possible")
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            _check_text_lengths(item, f"{where}.{str(key)[:64]}")


def _longest_replacement(charsmap: Any, where: str) -> float:
    """Return the characters of the longest text that a SentencePiece charsmap writes for one, in Unicode's longest form.

    A charsmap is base64 of a little-endian 32-bit size, a trie of that many bytes, and the replacements, each ended by a NUL.
    """
    if charsmap in (None, ""):
        return 1.0
    try:
        raw = base64.b64decode(charsmap, validate=True) if isinstance(charsmap, str) else bytes(charsmap)
        (size,) = struct.unpack_from("<I", raw)
        texts = raw[4 + size :].decode("utf-8").split("\0")
    except (ValueError, TypeError, struct.error, binascii.Error):
        raise ValueError(f"{where}: {quoted(charsmap)} is not a charsmap of SentencePiece") from None
    longest = max(len(unicodedata.normalize("NFKD", text)) for text in texts)
    if longest > GROWTH:
        raise ValueError(f"{where}: writes {longest} characters for one, at most {GROWTH} are possible")
    return float(longest)


def _checked_match_length(value: Any, where: str) -> int:
    """Return the least number of characters that a pattern matches. Raises ValueError for one that may search for long."""
    named = value if isinstance(value, dict) and len(value) == 1 else {}
    if isinstance(text := named.get("String"), str) and 0 < len(text) <= LONGEST_WORD:
        return len(text)
    if not (isinstance(pattern := named.get("Regex"), str) and 0 < len(pattern) <= LONGEST_PATTERN):
        raise ValueError(f"{where}: {quoted(value)} is not a text or pattern")
    if why := why_slow(pattern):
        raise ValueError(f"{where}.Regex: {quoted(pattern)}: {why}")
    return 1


def why_slow(pattern: str) -> str:
    """Return why an Oniguruma pattern's search may take more than linear time; "" if it cannot.

    Each alternative must be in _KNOWN, or be a sequence of characters and classes in which no mandatory one follows one with
    unlimited repetition. Then the search never backtracks far.
    """
    try:
        for branch in _branches(pattern):
            if branch not in _KNOWN:
                _check_branch(branch)
    except ValueError as error:
        return str(error)
    return ""


def _branches(pattern: str) -> list[str]:
    """Return the alternatives of a pattern. A pattern that is a single group is opened; one in _KNOWN stays whole."""
    if pattern in _KNOWN:
        return [pattern]
    # (position, number of groups that are open behind it) of each character outside of escapes and classes
    depths, at, depth = list[tuple[int, int]](), 0, 0
    while at < len(pattern):
        if pattern[at] in "\\[":
            at = _end_of_atom(pattern, at)
            continue
        depth += {"(": 1, ")": -1}.get(pattern[at], 0)
        depths.append((at, depth))
        at += 1
    ends = [at for at, depth in depths if pattern[at] == "|" and depth == 0]
    if ends:
        return [pattern[start + 1 : end] for start, end in pairwise([-1, *ends, len(pattern)])]
    closed = next((at for at, depth in depths if depth == 0), None)  # the end of a group that begins the pattern
    if pattern.startswith("(") and not pattern.startswith("(?") and closed == len(pattern) - 1:
        return _branches(pattern[1:-1])
    return [pattern]


def _check_branch(branch: str) -> None:
    """Raise ValueError for an alternative that may backtrack more than a few times."""
    at, ways, endless = 0, 1, False
    while at < len(branch):
        start, at = at, _end_of_group(branch, at) if branch[at] == "(" else _end_of_atom(branch, at)
        least, most, at = _times(branch, at)
        if endless and least > 0:
            raise ValueError(f"{ascii(branch[start:at])[:64]} must follow what may be there any number of times")
        if branch[start] == "(" and most is None:
            raise ValueError(f"{ascii(branch[start:at])[:64]} repeats a group")
        endless = endless or most is None
        ways *= 1 if most is None else most - least + 1
        if ways > 2**10:
            raise ValueError(f"{ascii(branch)[:64]} may be read in over {2**10} ways")


def _times(branch: str, at: int) -> tuple[int, int | None, int]:
    """Return (least, most, end) of the repetition at position `at`; most is None if unlimited. `end`: the position after it."""
    found = _TIMES.match(branch, at)
    if found is None:
        return 1, 1, at
    if branch[found.end() : found.end() + 1] in ("?", "*", "+") and found.end() < len(branch):
        raise ValueError(f"{branch[at : found.end() + 1]!a}: repeats a repetition")
    if found[4]:
        least, most = {"?": (0, 1), "*": (0, None), "+": (1, None)}[found[4]]
        return least, most, found.end()
    least = int(found[1])
    most = least if not found[2] else int(found[3]) if found[3] else None
    if least > 2**9 or (most is not None and most - least > _MOST_TIMES):
        raise ValueError(f"{found[0]} is over {_MOST_TIMES} times")
    return least, most, found.end()


def _end_of_atom(text: str, at: int) -> int:
    """Return where the character, escape or class ends that begins here. Raises ValueError for anything else."""
    if text[at] == "\\":
        if found := _ESCAPE.match(text, at):
            return found.end()
        raise ValueError(f"{text[at : at + 8]!a} is not an escape known here")
    if text[at] == "[":  # a class, which may hold others
        begin, at = at, at + (2 if text[at + 1 : at + 2] == "^" else 1)
        if text[at : at + 1] == "]":
            raise ValueError(f"{text[begin : at + 1]!a} is an empty class")
        while at < len(text) and text[at] != "]":
            at = _end_of_atom(text, at) if text[at] in "\\[" else at + 1
        if at >= len(text):
            raise ValueError(f"{ascii(text[begin:])[:32]} has no end")
        return at + 1
    if text[at] in "](){}*+?|^$":
        raise ValueError(f"{text[at]!r} at character {at + 1} has a meaning that is not allowed there")
    return at + 1


def _end_of_group(branch: str, at: int) -> int:
    """Return where a group of alternatives ends, each of characters and classes once."""
    found = re.compile(r"\((\?i:|\?:)?").match(branch, at)
    at = found.end() if found else at
    while at < len(branch) and branch[at] != ")":
        at = at + 1 if branch[at] == "|" else _end_of_atom(branch, at)
    if at >= len(branch):
        raise ValueError(f"{ascii(branch)[:32]} has a group without end")
    return at + 1


def quoted(value: Any) -> str:
    """Return a value for a message, in ASCII and shortened."""
    return ascii(value)[:80]
