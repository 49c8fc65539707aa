"""Importer of a user's own pictures, in a folder per site. Labels are masks, a folder per class, or a table."""

import re
import shlex
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from consilium.core.errors import DataError
from consilium.data.folders import (
    UNREAD,
    are_patients,
    list_class_pictures,
    may_have_classes,
    select_sites,
    split_of,
    subfolders,
    unreadable_role_reason,
)
from consilium.data.importers.base import (
    Importer,
    ImportResult,
    Options,
    SourceSample,
    find_files,
    wrong_layout,
)
from consilium.data.importers.labels import dataset_json_labels, result_of_labels
from consilium.data.importers.table import Table, find_table, open_table
from consilium.data.pairs import Names, Pairs, Pattern, find_pairs, has_pairs, role_of_name, unpaired_message, words
from consilium.data.patients import check_identifier
from consilium.data.safe_open import FOREIGN, PICTURES, is_dicom

LAYOUT = (
    "a folder per site: images/ and masks/, or other names such as a.png and a_mask.png, a mask of one channel with 0 outside; "
    "a folder per class; or a CSV file as `csv` reads"
)
PATIENTS = "; name them as `patient` in the lists and cut again by `data split`"
_MANY, _FEW, _MOST = 5, 2, 20
"""Folders may be patients instead of sites if there are at least _MOST. The same holds for _MANY if their names differ only in
numbers, or if the median folder has at most _FEW samples."""
_SITE = re.compile(
    r"(?i)site|hosp|h[oô]pital|osped|spital|kranken|cent[re]|zentrum|clinic|klinik|praxis|client|instit|uni|domain|node|vendor"
)
"""Parts of folder names that mark a site, not a patient."""
_DIAGNOSIS = re.compile(
    r"(?i)benign|malign|normal|health|tumou?r|cancer|karzin|carcin|lesion|positiv|negativ|disease|patholog|infect|covid|pneumon"
    r"|melanom|fractur|control|\bamd\b|glaucom|cyst|gesund|krank"
)
"""Parts of folder names that mark a class, not a site."""
_NUMBER = re.compile(r"\d{3}")
"""Numbers as in names of patients. Grades and stages have fewer digits."""
_UNREAD = (*chain.from_iterable(FOREIGN), ".webp", ".heic", ".avif", ".jp2", ".j2k", ".pgm", ".ppm")
"""Endings of pictures that are not read."""
_SPLITS = {"tr": "training", "ts": "test"}
"""Splits by the last word of nnU-Net's and the Decathlon's folder names, such as imagesTr."""
Site = tuple[list[SourceSample], list[str]]
"""The samples of a site, and notes for the user."""


def read_site_folders(source: Path, options: Options) -> ImportResult:
    """Read a folder of sites, or the folder of one site. The job's classes follow from the values in masks, or from names.

    Raises DataError for another layout, a picture without a mask, sizes that differ, and masks that are not label pictures.
    """
    below = subfolders(source)
    roles = {role_of_name(one.name) for one in below} | {"image" for one in source.iterdir() if _is_picture(one)}
    plain = [one for one in below if role_of_name(one.name) is None and any(map(_is_picture, one.iterdir()))]
    patients = options.patient_folders is not False and (
        are_patients(one.name for one in below)
        or (options.patient_folders is True and bool(below) and not any(map(_has_pictures_below, below)))
    )
    one_site = roles >= {"image", "mask"} or ("mask" in roles and bool(plain)) or patients
    asked = [] if one_site else _selected_folders(source, below, options)
    sites = {one.name: site for one in asked if (site := _read_site(one, replace(options, only=())))}
    notes: list[str] = []
    whole = None
    if options.patient_folders and all(isinstance(own.label, str) for found, _ in sites.values() for own in found):
        called = any(map(_SITE.search, sites))
        whole = (None if called else _read_patients_within_classes(source)) or _read_classes_within_patients(source, True)
        if whole is None and _why_not_sites(sites):
            whole = _read_patients_within_classes(source, True)
    if whole is not None or not sites or all(map(_named_split, sites)):
        whole = whole or _read_site(source, options)
        if whole is None:
            for path in sorted(source.glob("[!.]*.[cC][sS][vV]")):
                open_table(path, {})  # raises the error that says what is wrong with the table
            unread = _describe_unread(source)
            if options.patient_folders is None and not unread and _has_patients_within_classes(source):
                raise DataError(
                    f"{source}: holds folders of folders, which may be classes with a folder for each patient; "
                    "--patient-folders reads them so"
                )
            raise DataError(f"{source}: {unread}; {UNREAD}") if unread else wrong_layout(source, LAYOUT)
        sites = {source.resolve().name: whole}
    else:
        _refuse_other_folders(source, sites, options)
        left = [one.name for one in asked if one.name not in sites]
        notes += [
            f"{name}: left out, it has neither masks nor classes nor a table that `consilium data import csv` reads"
            for name in left
        ]
        if table := find_table(source):
            notes.append(
                f"{table.path.name}: not read; `consilium data import csv {shlex.quote(str(table.path))} DEST --add` adds it"
            )
    samples = [one for found, _ in sites.values() for one in found]
    told = [f"{name}: {note}" for name, (_, own) in sites.items() for note in own]
    places = [source / name for name in sites if (source / name).is_dir()] or [source]
    taken = {path for one in samples for path in (one.image, one.label)}
    told += [f"{place.name}: {lost}; {UNREAD}" for place in places if (lost := _describe_unread(place, taken))]
    told += [f"{place.name}: {lost}" for place in places if (lost := _unclassified_pictures_text(place, samples))]
    named = [own for folder in (source, *(source / name for name in sites)) if (own := dataset_json_labels(folder))]
    if all(own == named[0] for own in named):
        notes += ["the names of classes are those of dataset.json"] if named else []
    else:
        notes.append("the names of classes are not those of dataset.json, which differ by site")
    return result_of_labels(source, samples, [*told, *notes], options, PATIENTS, named)


def _is_picture(path: Path) -> bool:
    return path.name.lower().endswith(PICTURES)


def _selected_folders(source: Path, below: Sequence[Path], options: Options) -> Sequence[Path]:
    """Return the folders of sites that --only names; without --only, all of `below`.

    If a name is not among them, but may be the source itself or a site of the source's table, none is returned; otherwise
    DataError is raised.
    """
    try:
        asked = select_sites([one.name for one in below], options.only, options.rename)
    except DataError:
        if source.resolve().name in options.only or find_table(source):
            return []
        raise
    return [one for one in below if one.name in asked]


def _why_not_sites(sites: Mapping[str, Site]) -> str:
    """Return why the folders taken as sites are probably classes that hold a folder per patient; "" if nothing suggests it.

    Suspected are folders that all hold classes, if no folder is called after a site and no sample has a patient. One sign is
    enough: no class is in two folders, class names contain patient-like numbers, or a folder is called after a diagnosis.
    """
    classes = {name: {one.label for one in found if isinstance(one.label, str)} for name, (found, _) in sites.items()}
    if not classes or not all(classes.values()) or any(map(_SITE.search, classes)):
        return ""
    if any(one.is_patient for found, _ in sites.values() for one in found):
        return ""
    told = "; ".join(f"{name}: {', '.join(sorted(own)[:3])}" for name, own in list(classes.items())[:2])
    every = set().union(*classes.values())
    if len(classes) > 1 and sum(map(len, classes.values())) == len(every):
        return f"its folders have no class in common ({told})"
    padded = all(map(str.isdecimal, every)) and any(one.startswith("00") for one in every)
    if padded or any(map(_NUMBER.search, every)):
        return f"its folders have numbers for classes ({told})"
    return f"its folders are called after classes ({told})" if any(map(_DIAGNOSIS.search, classes)) else ""


def _refuse_other_folders(source: Path, sites: Mapping[str, Site], options: Options) -> None:
    """Raise DataError for folders that may be something other than sites.

    They are patients, splits beside other folders, folds, classes whose pictures have masks, or classes with folders of
    patients.
    """
    counts = {name: len(found) for name, (found, _) in sites.items()}
    half = sorted(counts.values())[len(counts) // 2]
    numbered = len({re.sub(r"\d+", "", name) for name in counts}) == 1
    padded = len(counts) > 1 and numbered and all(map(str.isdecimal, counts)) and any(one.startswith("0") for one in counts)
    few = padded or (len(counts) >= _MANY and (half <= _FEW or numbered))
    # very many folders, or several that are numbered or nearly empty
    if options.patient_folders is None and (few or len(counts) >= _MOST) and not any(map(_SITE.search, counts)):
        names = sorted(counts)
        raise DataError(
            f"{source}: holds {len(counts)} folders, {names[0]} to {names[-1]}, half of them with at most {half} samples, "
            "which may be patients or sites; write which: --patient-folders makes one site of these patients, "
            "--no-patient-folders a site of each"
        )
    if splits := sorted(filter(_named_split, sites)):
        raise DataError(
            f"{source}: {splits[0]} is called after a split, and {min(set(sites) - set(splits))} beside it is not; "
            "call splits train, validation and test, or rename the folder if it is a site"
        )
    if len(sites) > 1 and all(re.fullmatch(r"(?i)(cv[ _-]?)?fold[ _-]?\d+", name) for name in sites):
        raise DataError(
            f"{source}: {', '.join(list(sites)[:3])} are called after folds of one site's data; "
            "import each by itself and join the lists, or rename the folders if they are sites"
        )
    masked = [name for name, (found, _) in sites.items() if any(isinstance(one.label, Path) for one in found)]
    called = [] if any(map(_SITE.search, masked)) else list(filter(_DIAGNOSIS.search, masked))
    why = _why_not_sites(sites)
    what = ""
    if options.patient_folders and why:
        what = f"{why}, and not every folder has a folder for each patient in it"
        what += "; move every picture into the folder of a patient in the folder of its class"
    elif options.patient_folders is None and not options.sites and called:
        what = f"{', '.join(called[:3])} are called after classes, and their pictures have masks; write which: "
        what += "--sites 1 makes one site of all, --no-patient-folders a site of each"
    elif options.patient_folders is None and why:
        what = f"{why}, so they may be classes with a folder for each patient; write which: "
        what += "--patient-folders reads them so, --no-patient-folders makes a site of each"
    if what:
        raise DataError(f"{source}: {what}")


def _unclassified_pictures_text(folder: Path, samples: Sequence[SourceSample]) -> str:
    """Return a note of the pictures below a folder of classes that are in no class and are not read; "" for none.

    Raises DataError if they are at least half as many as the samples.
    """
    own = [one for one in samples if isinstance(one.image, Path) and one.image.is_relative_to(folder)]
    if not own or not all(isinstance(one.label, str) for one in own):
        return ""
    taken = {one.image for one in own}
    left = [path for path in find_files(folder, PICTURES) if path not in taken and not path.parent.name.startswith(".")]
    if not left or find_table(folder):
        return ""
    what = f"{len(left)} pictures lie in no folder of a class and are not read, the first is {left[0].relative_to(folder)}"
    if 2 * len(left) >= len(own):
        raise DataError(f"{folder}: {what}; move each into the folder of its class")
    return what


def _has_pictures_below(folder: Path) -> bool:
    """Tell whether a folder, or a split's folder in it, has subfolders with pictures that are not named images or masks."""
    own = [one for one in subfolders(folder) if not role_of_name(one.name)]
    return any(_has_pictures_below(one) if _named_split(one.name) else bool(find_files(one, PICTURES)) for one in own)


def _read_site(folder: Path, options: Options) -> Site | None:
    """Return the samples of a site's folder, None if the layout is unknown. Raises DataError.

    The layouts are tried in this order: a table with masks, masks beside pictures, a table with classes, a folder per class,
    folders of patients and classes, folders of splits.
    """
    table, pictures = find_table(folder), find_files(folder, PICTURES)
    if table is not None and table.has_masks:
        return _read_table(table, folder, options)
    pairs, classes = find_pairs(folder, pictures, options.mask_patterns), may_have_classes(folder)
    if (
        pairs is not None
        and (not (pairs.alone or pairs.unused) or not classes or has_pairs(folder, pictures))
        and (pairs.found or table is None)
    ):
        try:
            return _read_pairs(folder, pairs, options)
        except DataError:
            if (by_split := _read_splits(folder, options)) is None:
                raise
            return by_split
    if table is not None:
        return _read_table(table, folder, options)
    if what := unreadable_role_reason(folder):
        raise DataError(f"{folder}: holds {what}")
    if classes:
        read = list(list_class_pictures(folder))
        named = {split: one.name for one in subfolders(folder) if (split := split_of(one.name))}
        lone = next(iter(named.values())) if len(named) == 1 else ""
        has_splits = bool(lone) or {part for part, _, _ in read} != {"training"}
        return [
            SourceSample(folder.resolve().name, str(path.relative_to(folder)), path, label, split=part if has_splits else None)
            for part, path, label in read
        ], _lone_split_notes(lone, options)
    asked = options.patient_folders is True
    by_class = None if options.patient_folders is False else _read_classes_within_patients(folder, asked)
    if by_class is not None and any(_DIAGNOSIS.search(str(one.label)) for one in by_class[0]):
        return by_class
    return _read_patients_within_classes(folder, asked) or _read_splits(folder, options)


def _read_splits(folder: Path, options: Options) -> Site | None:
    """Return the samples in a site's folders of splits, each read by itself.

    None for a folder without such folders, or with other folders beside those of a single split. Raises DataError.
    """
    parts = {one: split for one in subfolders(folder) if (split := _named_split(one.name))}
    several = len(set(parts.values())) > 1
    found = [(one, _read_site(one, options)) for one in parts] if several or len(subfolders(folder)) == len(parts) else []
    sites = [(one, own) for one, own in found if own is not None]
    if not found or len(sites) < len(found):
        return None
    name = folder.resolve().name
    lone = sites[0][0].name if not several and _may_be_lone_split(sites[0][0].name) else ""
    samples = [
        replace(
            one,
            site=name,
            group=one.group if one.is_patient else f"{place.name}/{one.group}",
            split=parts[place] if several or lone else None,
        )
        for place, (own, _) in sites
        for one in own
    ]
    notes = [f"{place.name}: {note}" for place, (_, notes) in sites for note in notes]
    return samples, [*notes, *_lone_split_notes(lone, options)]


def _read_table(table: Table, folder: Path, options: Options) -> Site:
    """Return the samples in a site's table. Lines that name no site belong to the folder's site."""
    return table.samples(folder.resolve().name, options), [f"{table.path.name} was read", *table.notes]


def _read_patients_within_classes(folder: Path, patients_declared: bool = False) -> Site | None:
    """Return the samples in folders of classes that hold a folder per patient, CLASS/PATIENT; None for another layout.

    `patients_declared`: the user says that the inner folders are patients, whatever their names.
    """
    classes = {one: subfolders(one) for one in subfolders(folder)}
    if patients_declared and any(
        role_of_name(one.name) or _named_split(one.name) for own in classes.items() for one in (own[0], *own[1])
    ):
        return None
    if not classes or not all(own and (patients_declared or are_patients(two.name for two in own)) for own in classes.values()):
        return None
    if any(map(_DIAGNOSIS.search, (three.name for own in classes.values() for two in own for three in subfolders(two)))):
        return None  # the innermost folders are classes
    return _samples_by_patient(
        folder, [(two, one, path) for one, own in classes.items() for two in own for path in find_files(two, PICTURES)]
    )


def _read_classes_within_patients(folder: Path, patients_declared: bool = False) -> Site | None:
    """Return the samples in folders of patients that hold a folder per class, PATIENT/CLASS; None for another layout.

    All outer folders must have a number in their names, and at least one inner folder must have none. `patients_declared`: the
    user says that there are folders of patients, so the outer names need no word for a patient.
    """
    patients = {one: subfolders(one) for one in subfolders(folder)}
    outer, below = [one.name for one in patients], {two.name for inner in patients.values() for two in inner}
    numbered = all(re.search(r"\d", one) for one in outer) and not all(re.search(r"\d", one) for one in below)
    if not (numbered and (patients_declared or are_patients(outer))) or any(
        role_of_name(one) or _named_split(one) for one in (*outer, *below)
    ):
        return None
    found = [(one, two, path) for one, inner in patients.items() for two in inner for path in find_files(two, PICTURES)]
    if not found or any(path.parent != two for _, two, path in found) or len({one for one, _, _ in found}) < len(patients):
        return None
    return _samples_by_patient(folder, found)


def _samples_by_patient(folder: Path, found: Sequence[tuple[Path, Path, Path]]) -> Site:
    """Return the samples of (folder of a patient, folder of a class, picture) triples."""
    site = folder.resolve().name
    return [
        SourceSample(site, check_identifier(str(patient), "patient", patient.name), path, label.name, is_patient=True)
        for patient, label, path in found
    ], []


def _has_patients_within_classes(source: Path) -> bool:
    """Tell whether --patient-folders would read a folder, or one of its subfolders, as classes with patients."""
    return any(
        len({one.label for one in site[0]}) > 1
        and all(isinstance(one.image, Path) and one.image.parent.parent.parent == place for one in site[0])
        for place, site in ((one, _read_patients_within_classes(one, True)) for one in (source, *subfolders(source)))
        if site is not None
    )


def _describe_unread(folder: Path, taken: Collection[object] = ()) -> str:
    """Return a note of the files below a folder that are pictures of unread kinds; "" for none. Files in `taken` are read."""
    left = [path for path in find_files(folder, ("",)) if not (_is_picture(path) or path in taken or path.parent in taken)]
    kinds_of = ("DICOM" if is_dicom(path) else path.suffix.lower() for path in left)
    found = Counter(kind for kind in kinds_of if kind == "DICOM" or kind in _UNREAD)
    kinds = ", ".join(f"{kind} ({count})" for kind, count in sorted(found.items()))
    return f"files of kinds that are not imported by folder: {kinds}" if kinds else ""


def _read_pairs(folder: Path, pairs: Pairs, options: Options) -> Site:
    """Return a site's pictures with their masks. Raises DataError for pictures without a mask, or with two kinds of masks."""
    asked = options.mask_patterns
    if pairs.others:
        both = " and ".join(f"'{one}'" for one in (pairs.pattern, *pairs.others))
        raise DataError(
            f"{folder}: every picture has masks by {both}, and one is read; choose by --mask-pattern '{pairs.pattern}'"
        )
    with_masks = {image.path.parent for image, _ in pairs.found}
    left_out = pairs.pattern in asked or not any(one.path.parent in with_masks for one in pairs.alone)
    if not pairs.found or (pairs.alone and not left_out):
        raise DataError(unpaired_message(pairs, folder))
    if 2 * len(pairs.unused) >= len(pairs.found) and pairs.pattern not in asked:
        places = sorted({str(mask.parent.relative_to(folder)) for mask in (pairs.found[0][1], pairs.unused[0])})
        choice = " or ".join(f"--mask-pattern '{place}/{{}}'" for place in places)
        choice = choice if len(places) == 2 else f"--mask-pattern '{pairs.pattern}' leaves them out"
        raise DataError(
            f"{folder}: '{pairs.pattern}' finds {len(pairs.found)} masks, and not {len(pairs.unused)} others, the first "
            f"{pairs.unused[0].relative_to(folder)}; choose: {choice}"
        )
    notes = []
    if pairs.pattern != Pattern():
        image, mask = pairs.found[0]
        notes.append(f"masks by --mask-pattern '{pairs.pattern}', as {mask.name} of {image.path.name}")
    for what, some in (
        ("pictures without a mask left out", [one.path for one in pairs.alone]),
        ("masks not used", pairs.unused),
    ):
        if some:
            notes.append(f"{len(some)} {what}, the first {some[0].relative_to(folder)}")
    splits = [_split_above(image) for image, _ in pairs.found]
    lone = ""
    if len({*splits, *map(_split_above, pairs.alone)}) == 1:  # the folder is named by all pictures, or there is none
        lone = min(next(filter(_may_be_lone_split, image.full.split("/")[:-1]), "") for image, _ in pairs.found)
        notes += _lone_split_notes(lone, options)
    published = None not in splits and (len(set(splits)) > 1 or bool(lone))
    whose: list[str] = []
    parts = [[part for part in image.short.split("/")[:-1] if not _named_split(part)] for image, _ in pairs.found]
    if options.patient_folders is not False and all(parts):
        levels = [[own[level] for own in parts] for level in range(min(map(len, parts)))]
        named = next((level for level in levels if are_patients(set(level))), levels[0] if options.patient_folders else [])
        whose = [check_identifier(str(folder), "patient", name) for name in named]
    together = len({image.short.rpartition("/")[0] for image, _ in pairs.found}) >= _MANY  # these folders may be patients
    if whose:
        notes.append(f"folders are taken as {len(set(whose))} patients, such as {whose[0]}; --no-patient-folders does not")
    if pairs.more:
        mask, more = next(iter(pairs.more.items()))
        notes.append(f"several masks of {len(pairs.more)} pictures are united, such as {mask.name} and {more[0].name}")
    return [
        SourceSample(
            folder.resolve().name,
            whose[number] if whose else image.short.rpartition("/")[0] if together else image.short,
            image.path,
            mask,
            split=split if published else None,
            is_patient=bool(whose),
            more=pairs.more.get(mask, ()),
        )
        for number, ((image, mask), split) in enumerate(zip(pairs.found, splits, strict=True))
    ], notes


def _named_split(name: str) -> str | None:
    return split_of(name) or _SPLITS.get(name.lower())


def _split_above(image: Names) -> str | None:
    """Return the split that a folder above a picture is named after, alone or with other words; None for none."""
    named_words = (word for part in image.full.split("/")[:-1] for word in (part, *words(part)))
    return next(filter(None, map(_named_split, named_words)), None)


def _may_be_lone_split(name: str) -> bool:
    """Tell whether the only folder of a split with this name is that split, with or without a word for images or masks.

    imagesTr is not: nnU-Net's sets have no masks of test pictures, so all pictures with masks are in it.
    """
    called = [word for word in words(name) if not role_of_name(word)]
    beside_role = len(called) == 1 and called[0].lower() != "tr" and _named_split(called[0]) is not None
    return beside_role or split_of(name) is not None


def _lone_split_notes(folder: str, options: Options) -> list[str]:
    """Return the note that all samples are of the split that their folder is named after; [] without such a folder."""
    if not folder or options.resplit:
        return []
    split = next(filter(None, map(_named_split, (folder, *words(folder)))))
    return [f"{folder}/ is taken as the {split} split; --resplit cuts it anew"]


SETS = {"own": Importer(LAYOUT, read_site_folders, ("mask_patterns", "exact_values", "patient_folders"), is_own=True)}
