"""Pairs of pictures and masks in a folder: which files are masks, and of which pictures, by names and by content.

The importers pair files with it; folders.py uses it to tell folders of classes from folders of masks. Loads neither numpy nor
torch.
"""

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import partial
from itertools import chain
from pathlib import Path

from consilium.core.errors import ConfigError, DataError
from consilium.core.grouping import group_by_key
from consilium.core.sanitize import first_names_text
from consilium.data.safe_open import NIFTI, PICTURES, SLIDES, open_picture, wrap_decoding_errors

_MASK = re.compile(r"masks?|segs?|segmentations?|labels?|lbls?|gt|truth|annotations?|rois?", re.IGNORECASE)
_IMAGE = re.compile(r"images?|imgs?|pictures?|photos?|scans?|raw|originals?", re.IGNORECASE)
"""Words in names of folders and files of masks, and of folders of images."""
MODES = ("1", "L", "P", "I;16", "I")
"""Pillow's modes of pictures with one channel of whole numbers."""
MOST_VALUES = 32
"""A picture with more different values is no mask: it is a photograph, or was saved as JPEG."""
_NUMBER = re.compile(r"(?<=.)([ _.-]+\d{1,2}|[ _.-]*\(\d{1,2}\))$")
_PROBES, _DRAWN, _BEST = 3, 50, 5
"""The number of pictures per folder that are opened, of names on which all patterns are tried, and of the best patterns,
which are tried on all names."""


@dataclass(frozen=True)
class Pattern:
    """How the name of a mask follows from its picture's. Both have no ending, and one `{}` for the part that they share.

    A name with a slash is a path from the site's folder, or the same path without the folder of images or masks.
    """

    image: str = "{}"
    mask: str = "{}"

    def __str__(self) -> str:
        return self.mask if self.image == "{}" else f"{self.image}={self.mask}"

    def mask_name_for(self, name: str) -> str | None:
        """Return the name of the mask for the name of a picture, None for a name that `image` does not match."""
        before, _, after = self.image.partition("{}")
        fits = len(name) >= len(before) + len(after) and name.startswith(before) and name.endswith(after)
        return self.mask.replace("{}", name[len(before) : len(name) - len(after)], 1) if fits else None


@dataclass(frozen=True)
class Names:
    """A file with two names without ending. `full`: its path from the site's folder. `short`: the same path without the
    folder of images or masks.
    """

    path: Path
    full: str
    short: str


@dataclass(frozen=True)
class Pairs:
    """Pictures with their masks, as found by `pattern`.

    `alone`: pictures without a mask. `unused`: masks of no picture. `others`: patterns by which every picture has another mask.
    `more`: by mask, further masks with the same name and a number at its end, such as a_mask_1 for a_mask: parts of one label.
    """

    pattern: Pattern
    found: list[tuple[Names, Path]]
    alone: list[Names]
    unused: list[Path]
    others: list[Pattern]
    more: dict[Path, tuple[Path, ...]]


def parse(text: str) -> Pattern:
    """Return the pattern that a user wrote: MASK, or IMAGE=MASK. Raises ConfigError."""
    image, equals, mask = text.partition("=")
    pattern = Pattern(image, mask) if equals else Pattern(mask=text)
    if pattern.image.count("{}") != 1 or pattern.mask.count("{}") != 1:
        raise ConfigError(
            f"--mask-pattern: {text!r}: expected MASK or IMAGE=MASK without endings, each with one {{}} for the part that "
            "both names share, as '{}_mask' or '{}_0000={}'"
        )
    return pattern


def compose_unicode(name: str) -> str:
    """Return a name in Unicode's composed form (NFC). Disks from a Mac may store letters and accents separately."""
    return unicodedata.normalize("NFC", name)


def without_ending(name: str) -> str:
    """Return a file's name without the ending of its picture format, such as .png or .nii.gz."""
    ending = max((one for one in PICTURES if name.lower().endswith(one)), key=len, default="")
    return name[: len(name) - len(ending)]


def find_pairs(
    folder: Path, files: Sequence[Path], patterns: Sequence[Pattern] = (), open_all_files: bool = True
) -> Pairs | None:
    """Return a folder's pictures with their masks, by the pattern that matches most; None if no file is a mask.

    `patterns`: the user's, which are tried first. `open_all_files`: all files may be opened to find masks, not only some per
    folder. Raises DataError for two files with the same name.
    """
    images, masks, named = _roles(folder, files, open_all_files)
    if not images or not masks:
        return None
    by_name: dict[str, Path] = {}
    for own in masks:
        if (other := by_name.setdefault(own.full, own.path)) != own.path:
            raise DataError(f"{own.path}: has the same name as {other}; keep one of the two")
    for own in masks:
        by_name.setdefault(own.short, own.path)
    folded = group_by_key((name.casefold(), path) for name, path in by_name.items())
    # a mask is also known by its lower-case name if no other mask has it
    known = by_name | {name: paths[0] for name, paths in folded.items() if len(set(paths)) == 1 and name not in by_name}
    asked = {pattern: len(_pair_by_pattern(pattern, images, known)) for pattern in patterns}
    if any(asked.values()):
        pattern, others = max(asked, key=asked.__getitem__), list[Pattern]()
    else:
        pattern, others = _best_pattern(images, masks, known)
    found = _pair_by_pattern(pattern, images, known)
    used: dict[Path, Names] = {}
    for image, mask in found:  # one name may occur with two endings
        if (first := used.setdefault(mask, image)) is not image:
            raise DataError(f"{image.path}: has the same name as {first.path}; keep one of the two")
    paired = {image.path for image, _ in found}
    alone = [image for image in images if image.path not in paired]
    if not named and len(found) <= len(alone):  # few grey values alone make no mask
        return None
    unused = [mask.path for mask in masks if mask.path not in used]
    more: dict[Path, tuple[Path, ...]] = {}
    if pattern not in patterns:  # unused masks with the name of a used one and a number at its end, or another number there
        unnumbered = partial(_NUMBER.sub, "")  # a blank or a sign separates the number from the name
        cut = unnumbered if _NUMBER.search(pattern.mask) else str
        bases = {(mask.parent, cut(without_ending(mask.name))): mask for mask in used}
        for path in unused:
            if base := bases.get((path.parent, unnumbered(without_ending(path.name)))):
                more[base] = (*more.get(base, ()), path)
    taken = {path for paths in more.values() for path in paths}
    others = [one for one in others if not taken.issuperset(mask for _, mask in _pair_by_pattern(one, images, known))]
    return Pairs(pattern, found, alone, [path for path in unused if path not in taken], others, more)


def has_pairs(folder: Path, files: Sequence[Path]) -> bool:
    """Tell whether most pictures of a folder have masks, so that its subfolders are no classes.

    Names of folders of both images and masks show it, or else the content of some masks.
    """
    try:
        pairs = find_pairs(folder, files, open_all_files=False)
    except DataError:  # two files with the same name: these are still no classes
        return True
    if pairs is None:
        return False
    if {"image", "mask"} <= {_role(parent, folder) for parent in {path.parent for path in files}}:
        return True
    return len(pairs.found) > len(pairs.alone) and all(_is_label_picture(mask) for _, mask in pairs.found[:_PROBES])


def unpaired_message(pairs: Pairs, folder: Path) -> str:
    """Return the message about a folder in which pictures lack masks: the names found, and what to write."""
    there = first_names_text([str(mask.relative_to(folder)) for mask in (*(mask for _, mask in pairs.found), *pairs.unused)])
    if len(pairs.found) < len(pairs.alone):
        remedy = "write --mask-pattern 'IMAGE=MASK' with {} for what both names share, such as '{}_0000={}'"
        if pairs.found:
            some = f"{len(pairs.found)} pictures such as {pairs.found[0][0].path.name}"
            remedy = f"--mask-pattern '{pairs.pattern}' takes {some} and leaves others out, as other sequences; or {remedy}"
        return f"{pairs.alone[0].path}: expected a mask of its name; found {there}; {remedy}"
    every, alone = len(pairs.found) + len(pairs.alone), pairs.alone[0]
    wanted = next(
        (Path(name).name for one in (alone.full, alone.short) if (name := pairs.pattern.mask_name_for(one))), "like the others'"
    )
    return (
        f"{pairs.alone[0].path}: expected a mask named {wanted}; by --mask-pattern '{pairs.pattern}' {len(pairs.found)} of "
        f"{every} pictures have one; found {there}; complete the set, or write --mask-pattern '{pairs.pattern}' to leave "
        "pictures without one out"
    )


# roles: which files are masks -------------------------------------------------------------------------------------------------


def _roles(folder: Path, files: Sequence[Path], open_all_files: bool) -> tuple[list[Names], list[Names], bool]:
    """Return the images, the masks, and whether words in names tell them apart.

    Words are searched in the names of folders, then in the names of files. Without any, some files of each folder are opened,
    and if these show no folder of masks and `open_all_files` is set, all files.
    """
    by_parent = group_by_key((path.parent, path) for path in files)
    role = {parent: _role(parent, folder) for parent in by_parent}
    drawn = {parent for parent, own in role.items() if own == "mask"}
    by_words = bool(drawn)
    chosen = {path for path in files if path.parent in drawn}
    chosen = chosen or {path for path in files if role_of_name(without_ending(path.name)) == "mask"}
    named = bool(chosen)
    if not chosen and len(by_parent) > 1:
        probes = {one: own[:: max(1, len(own) // _PROBES)][:_PROBES] for one, own in by_parent.items() if role[one] is None}
        drawn = {one for one, some in probes.items() if all(map(_is_label_picture, some))}
        chosen = {path for path in files if path.parent in drawn}
    if not chosen and open_all_files:
        chosen = {path for path in files if _is_label_picture(path)}
    images, masks = list[Names](), list[Names]()
    for path in files if chosen else ():
        inside = path.relative_to(folder)
        parts, name = list(inside.parent.parts), without_ending(inside.name)
        # the short name lacks a folder: with `by_words` the last one named images or masks, else the last one
        places = [i for i, part in enumerate(parts) if not by_words or role_of_name(part)] if drawn else []
        found = Names(
            path,
            compose_unicode("/".join([*parts, name])),
            compose_unicode("/".join([*(part for i, part in enumerate(parts) if i not in places[-1:]), name])),
        )
        (masks if path in chosen else images).append(found)
    return images, masks, named


def _role(parent: Path, folder: Path) -> str | None:
    """Return "image" or "mask" by the name of a folder, else by the nearest folder above it within `folder`; else None."""
    return next((kind for part in reversed(parent.relative_to(folder).parts) if (kind := role_of_name(part))), None)


def role_of_name(name: str) -> str | None:
    """Return "mask" or "image" if a word of the name says so, else None."""
    return next((kind for kind, form in (("mask", _MASK), ("image", _IMAGE)) if any(map(form.fullmatch, words(name)))), None)


def words(name: str) -> list[str]:
    """Return the words of a name. Signs, digits and capitals separate words: labelsTr has two."""
    return re.findall(r"[A-Z]?[^\W\d_A-Z]+|[A-Z]+", name)


def _is_label_picture(path: Path) -> bool:
    """Tell whether a file looks like a label picture: few different values, grey or with a palette.

    NIfTI and slides are not opened.
    """
    if path.name.lower().endswith((*NIFTI, *SLIDES)):
        return False
    try:
        with wrap_decoding_errors(path, "cannot be read as a picture"), open_picture(path) as picture:
            if picture.mode == "F":
                return False
            if picture.mode in MODES:
                return (picture.convert("I") if picture.mode.startswith("I") else picture).getcolors(MOST_VALUES) is not None
            colours = picture.convert("RGB").getcolors(MOST_VALUES) or []
            return len(colours) > 1 and all(isinstance(one, tuple) and len(set(one)) == 1 for _, one in colours)
    except DataError:
        return False


# names: the picture of each mask --------------------------------------------------------------------------------------------


def _pair_by_pattern(pattern: Pattern, images: Sequence[Names], known: Mapping[str, Path]) -> list[tuple[Names, Path]]:
    """Return (picture, mask) for the pictures for which a pattern finds a mask in `known`, masks by name."""
    whole = "/" in pattern.image
    found = []
    for image in images:
        names = [pattern.mask_name_for(one) for one in ((image.full, image.short) if whole else (image.short, image.full))]
        mask = next((known[key] for name in names if name for key in (name, name.casefold()) if key in known), None)
        if mask is not None:
            found.append((image, mask))
    return found


def _best_pattern(images: Sequence[Names], masks: Sequence[Names], known: Mapping[str, Path]) -> tuple[Pattern, list[Pattern]]:
    """Return the pattern that finds the most masks, the shortest of equal ones, and equally good patterns.

    The latter find a mask for every picture, and none of the masks of the first pattern.
    """
    if len(_pair_by_pattern(Pattern(), images, known)) == len(images):
        return Pattern(), []
    drawn = images[:: max(1, len(images) // _DRAWN)]

    def rank(among: Sequence[Names]) -> dict[Pattern, tuple[int, int]]:
        return {one: (len(_pair_by_pattern(one, among, known)), -len(one.image + one.mask)) for one in tried}

    tried = list(dict.fromkeys(_patterns(drawn, [mask.short for mask in masks])))
    tried = sorted(tried, key=rank(drawn).__getitem__, reverse=True)[:_BEST]
    last = rank(images)
    best = max(tried, key=last.__getitem__)
    own = {mask for _, mask in _pair_by_pattern(best, images, known)}
    equal = [one for one in tried if one is not best and last[one][0] == last[best][0] == len(images)]
    return best, [one for one in equal if {mask for _, mask in _pair_by_pattern(one, images, known)}.isdisjoint(own)]


def _patterns(images: Sequence[Names], masks: Sequence[str]) -> Iterator[Pattern]:
    """Yield patterns that pair some picture with some mask: each replaces a part, or the longest run, that both names share."""
    yield Pattern()
    having = group_by_key((part, mask) for mask in masks for part in _name_parts(mask))
    for image in {0: images[0], 1: images[len(images) // 2], 2: images[-1]}.values():
        own = image.short
        # numbers rather than common words
        rare = sorted((having[part] for part in _name_parts(own) if part in having), key=len)[:2]
        for mask in dict.fromkeys(chain(*(some[:_DRAWN] for some in rare), masks[:_DRAWN])):
            match = SequenceMatcher(None, own, mask, autojunk=False).find_longest_match()
            shared = _name_parts(own) & _name_parts(mask) | {own[match.a : match.a + match.size]}
            for part in sorted(shared - {""}):
                yield Pattern(own.replace(part, "{}", 1), mask.replace(part, "{}", 1))


def _name_parts(name: str) -> set[str]:
    """Return the runs of digits, of letters, and of letters and digits in a name."""
    return {*re.findall(r"[^\W_]+", name), *re.findall(r"\d+|[^\W\d_]+", name)}
