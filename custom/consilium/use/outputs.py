"""Which files predictions go to, and that none of them takes the place of an input, of another's, or of one that is there."""

from dataclasses import dataclass
from pathlib import Path

from consilium.core.errors import ConfigError
from consilium.core.sanitize import shown
from consilium.use.inputs import Input
from consilium.use.write_predictions import mask_name, with_ending

CLASSES, LABELS = "classes.csv", "labels.json"


@dataclass(frozen=True)
class OutputOptions:
    """Where predictions go, and what beside the masks is wanted; `force`: files there may be replaced."""

    out: Path
    overlays: bool = False
    probabilities: bool = False
    force: bool = False


def clashes(task: str, inputs: list[Input], wanted: OutputOptions) -> tuple[list[Input], list[tuple[Input, str]]]:
    """Return the inputs that are written apart, and those that would share a file with one before them, with the reason.

    A and a are the same: on some disks they are.
    """
    taken: dict[str, str] = dict.fromkeys(map(str.casefold, _shared(task)), "the tables")
    apart, clashing = list[Input](), list[tuple[Input, str]]()
    for one in inputs:
        names = _files_of(task, one, wanted)
        if (clash := next((name for name in names if name.casefold() in taken), None)) is None:
            apart.append(one)
            taken |= dict.fromkeys(map(str.casefold, names), one.name)
        else:
            what = f"{shown(clash)!r} is written for {shown(taken[clash.casefold()])!r}"
            clashing.append((one, f"{one.path}: {what}; rename one of the two, or predict them apart"))
    return apart, clashing


def check_files(task: str, inputs: list[Input], apart: list[Input], wanted: OutputOptions) -> None:
    """Raise ConfigError where what is written of `apart` would replace an input, or what is there without `force`."""
    names = [*_shared(task), *(name for one in apart for name in _files_of(task, one, wanted))]
    _check_inputs(names, inputs, wanted)
    _check_free(names, wanted)


def _shared(task: str) -> list[str]:
    """Return the files that are about all inputs."""
    return {"classification": [CLASSES], "segmentation": [LABELS]}.get(task, [])


def _files_of(task: str, one: Input, wanted: OutputOptions) -> list[str]:
    if task == "classification":
        return []
    if task != "segmentation":
        return [one.name]
    mask = mask_name(one.name)
    more = [overlay_name(mask)] if wanted.overlays else []
    return [mask, *more, *([probability_name(mask)] if wanted.probabilities else [])]


def _check_inputs(names: list[str], inputs: list[Input], wanted: OutputOptions) -> None:
    """Raise ConfigError, `force` or not, where a file would take the place of an input, or of a file of its series."""
    originals = {_place(path) for one in inputs for path in (one.path.iterdir() if one.path.is_dir() else [one.path])}
    for name in names:
        path = wanted.out / name
        if path.exists() and _place(path) in originals:
            raise ConfigError(f"--out: {shown(path)}: is an input, which is never replaced; give another folder")


def _place(path: Path) -> tuple[int, int]:
    """Return what tells a file from all others, whatever names and links it has."""
    try:
        told = path.stat()
    except OSError:  # a link to nowhere
        return (-1, -1)
    return (told.st_dev, told.st_ino)


def _check_free(names: list[str], wanted: OutputOptions) -> None:
    if wanted.out.exists() and not wanted.out.is_dir():
        raise ConfigError(f"{wanted.out}: is a file; give a folder")
    inside = {folder for name in names for folder in Path(name).parents if folder != Path()}
    if away := sorted(folder for folder in inside if (wanted.out / folder).is_symlink()):
        raise ConfigError(
            f"--out: {shown(wanted.out / away[0])}: is a link to another folder; remove it, or give another --out"
        )
    there = [name for name in names if (wanted.out / name).exists()]
    if there and not wanted.force:
        more = f" and {len(there) - 1} more" if len(there) > 1 else ""
        raise ConfigError(f"{wanted.out / there[0]}{more}: is there already; give another folder, or --force to replace it")


def overlay_name(name: str) -> str:
    """Return the name of the overlay beside a mask."""
    return with_ending(name, "overlay", ".png")


def probability_name(name: str) -> str:
    """Return the name of the probabilities beside a mask."""
    low = name.lower()
    ending = ".dcm" if low.endswith((".dcm", ".dicom")) else ".nii.gz" if low.endswith((".nii", ".nii.gz")) else ".tif"
    return with_ending(name, "probabilities", ending)
