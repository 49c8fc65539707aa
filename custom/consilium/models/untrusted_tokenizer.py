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
from typing import Any

from consilium.core.errors import STOPS, CheckpointError, ConsiliumError, UnfitError

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
_KNOWN_ALTERNATIVE = re.compile(rf"(?:{'|'.join(map(re.escape, sorted(_KNOWN)))})(?=\||\Z)")
_ESCAPE = r"\\(?:[pP]\{\^?\w{1,32}\}|[sSdDwWhHrntfv]|x[0-9A-Fa-f]{2}|x\{[0-9A-Fa-f]{1,6}\}|u[0-9A-Fa-f]{4}|[^\w\s])"
_INNER_CLASS = rf"\[(?!\^?\])(?:{_ESCAPE}|[^\\\[\]])+\]"
_CLASS = rf"\[(?!\^?\])(?:{_ESCAPE}|{_INNER_CLASS}|[^\\\[\]])+\]"
_ATOM = rf"(?:{_ESCAPE}|{_CLASS}|[^\\\[\](){{}}*+?|^$])"
_PIECE = re.compile(
    rf"(?:(?P<group>\((?:\?i:|\?:)?(?:{_ATOM}|\|)*\))|{_ATOM})"
    r"(?:\{(?P<least>\d{1,3})(?:(?P<comma>,)(?P<most>\d{0,3}))?\}|(?P<sign>[?*+])\+?)?",
    re.ASCII,
)
"""A character, an escape, a class or a group of alternatives of these, with its repetition."""
_MOST_WAYS = 2**10
"""The most ways in which an alternative of a pattern may be read."""


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


@contextmanager
def replace_record_errors(name: str) -> Iterator[None]:
    """Within the context, turn a tokenizer's or chat template's failure for a record into UnfitError with the record's name."""
    try:
        yield
    except CheckpointError as error:
        raise UnfitError(f"{name}: {error}") from None


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
    program = {name: None if step is None else json.loads(step.__getstate__()) for name, step in steps.items()}
    check_tokenizer_json(program | {"model": {"dropout": getattr(backend.model, "dropout", None)}}, where)


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
    """Return how many characters a step may make from one. Raises ValueError if its pattern may be slow, see `is_linear`."""
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
    if not is_linear(pattern):
        raise ValueError(
            f"{where}.Regex: {quoted(pattern)} may be searched for long: after what may repeat without limit only optional "
            "characters and classes are possible"
        )
    return 1


def is_linear(pattern: str) -> bool:
    """Return whether Oniguruma's search for a pattern is known to take linear time.

    Each alternative must be in _KNOWN, or be a sequence of characters, classes and plain groups in which no mandatory one
    follows one with unlimited repetition. Then the search never backtracks far. A group around the whole pattern is opened.
    """
    whole = pattern.startswith("(") and pattern.endswith(")") and _has_linear_alternatives(pattern[1:-1])
    return whole or _has_linear_alternatives(pattern)


def _has_linear_alternatives(pattern: str) -> bool:
    at, begins, ways, endless = 0, True, 1, False
    while at < len(pattern):
        if pattern[at] == "|":
            at, begins, ways, endless = at + 1, True, 1, False
        elif begins and (known := _KNOWN_ALTERNATIVE.match(pattern, at)):
            at = known.end()
        elif piece := _PIECE.match(pattern, at):
            at, begins = piece.end(), False
            least, most = _repetitions(piece)
            if (endless and least > 0) or (piece["group"] and most is None) or least > 2**9:
                return False
            if most is None:
                endless = True
            elif not least <= most <= least + 16 or (ways := ways * (most - least + 1)) > _MOST_WAYS:
                return False
        else:
            return False
    return True


def _repetitions(piece: re.Match[str]) -> tuple[int, int | None]:
    """Return the least and the largest number of repetitions of a piece of a pattern; None if it is unlimited."""
    if sign := piece["sign"]:
        return {"?": (0, 1), "*": (0, None), "+": (1, None)}[sign]
    least = int(piece["least"] or 1)
    return least, least if not piece["comma"] else int(piece["most"]) if piece["most"] else None


def quoted(value: Any) -> str:
    """Return a value for a message, in ASCII and shortened."""
    return ascii(value)[:80]
