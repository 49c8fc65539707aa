"""Where a job's data come from, the data sets that a site names, and which of them a job gets."""

import re
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, StrictInt, StrictStr, model_validator

from consilium.core.errors import ConfigError, Reason, RefusedError
from consilium.core.schema import MOST_CLASSES, ClassName, Section, Share
from consilium.data.settings import NiftiAffine
from consilium.data.text import has_texts

DatasetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64)]

PHANTOMS = {
    "fundus": "segmentation",
    "nuclei": "segmentation",
    "organ": "segmentation",
    "cells": "classification",
    "sentences": "language",
    "codes": "language",
}
"""The task each kind of generated data is for."""


class PhantomConfig(Section):
    """Generated data for a site that has none of its own: counts per split and the strength of both shifts (0 to 1).

    An `organ` is a volume with a lesion in it, a study per count; PNG are pictures of all its slices.
    """

    kind: Annotated[
        Literal["fundus", "nuclei", "organ", "cells", "sentences", "codes"], Field(description="what is drawn or written")
    ]
    training: Annotated[int, Field(ge=1, le=100_000, description="samples to train on")] = 24
    validation: Annotated[int, Field(ge=0, le=100_000, description="samples to validate on")] = 8
    test: Annotated[int, Field(ge=0, le=100_000, description="samples to test on")] = 16
    appearance: Annotated[Share, Field(description="strength of the shift of pictures between sites")] = 0.7
    annotation: Annotated[
        Share,
        Field(
            description="`annotation` is the shift of labels: how raters draw masks, and for `cells` and texts how "
            "unevenly a site sees the classes, or the codes"
        ),
    ] = 0.7
    classes: Annotated[
        Annotated[int, Field(ge=1, le=5)] | None,
        Field(
            description="a site learns from this many of the five kinds of cells; sites 1, 2, ... go round all of them, "
            "and the test split has all at every site"
        ),
    ] = None
    files: Annotated[Literal["nifti", "dicom", "png"], Field(description="what an organ's volumes are written as")] = "nifti"
    groups: Annotated[
        Annotated[int, Field(ge=1, le=10_000)] | None,
        Field(
            description="sites 1, 2, ... take turns to belong to one of so many groups, whose sites have the same shifts; "
            "without it no two sites have"
        ),
    ] = None

    @model_validator(mode="after")
    def _groups_are_drawn(self) -> Self:
        if self.groups and PHANTOMS[self.kind] == "language":
            raise ValueError("groups: sites that write texts have none; leave it out")
        return self

    @model_validator(mode="after")
    def _has_classes(self) -> Self:
        if self.classes is not None and self.kind != "cells":
            raise ValueError(f"classes: {self.kind} have no mix of classes; leave it out, or take kind cells")
        return self


class DataConfig(Section):
    """Data the job brings along, where a site's own data list always wins, or the name of a data set that every site has."""

    phantoms: Annotated[PhantomConfig | None, Field(description="generated data for sites that have none of their own")] = None
    dataset: Annotated[
        DatasetName | None,
        Field(description="the data set that a job gets of sites with several; every site has one of this name"),
    ] = None
    most_training: Annotated[
        Annotated[int, Field(ge=1, le=1_000_000)] | None,
        Field(
            description="a site trains on at most this many samples of its list (a volume or a slide is one), drawn by the"
            " job's seed, whatever their classes; a smaller number takes a part of what a larger one takes: "
            "learning curves"
        ),
    ] = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.phantoms is not None and self.dataset is not None:
            raise ValueError("a data set that sites must have, and phantoms for sites that have none; give one of them")
        return self


# datasets --------------------------------------------------------------------------------------------------------------
# A site's data sets: the `datasets:` section of site.yaml, and which of them a job gets.

LabelValue = Annotated[StrictInt, Field(ge=-(2**31), lt=2**31)] | Annotated[StrictStr, Field(min_length=1, max_length=200)]
Mapped = Annotated[tuple[ClassName, ...], Field(max_length=MOST_CLASSES)]
_WHOLE = re.compile(r"-?(0|[1-9][0-9]{0,9})")


def _number(key: Any) -> Any:
    return int(key) if isinstance(key, str) and _WHOLE.fullmatch(key) else key


def _parse_label_map(value: Any) -> Any:
    """Put a single class into a list, and turn numbers that JSON made texts into numbers."""
    if not isinstance(value, Mapping):
        return value
    found = {_number(key): [names] if isinstance(names, str) else names for key, names in value.items()}
    if len(found) < len(value):
        raise ValueError("every label once; one is there as a number and as a text")
    return found


LabelMap = Annotated[dict[LabelValue, Mapped], Field(min_length=1, max_length=4096), BeforeValidator(_parse_label_map)]


class DatasetConfig(Section):
    """One of a site's data sets."""

    datalist: Annotated[Path, Field(description="the data set's list, as `datalist` of a site with one data set")]
    labels: Annotated[
        LabelMap | None,
        Field(
            description="`labels` maps what the site calls a label (a mask's value, a DICOM region's name, a picture's "
            "class) to the job's class, or to a list of classes. An empty list is background; a picture's "
            "class with one leaves its pictures out. Names that a job does not have are left alone, because "
            "several jobs may use the map; printable, without /"
        ),
    ] = None
    annotated: Annotated[
        Mapped | None,
        Field(
            description="the classes that the masks show, where the list itself does not say; without it all of the job's;"
            " printable, without /"
        ),
    ] = None
    nifti_affine: Annotated[
        NiftiAffine | None,
        Field(
            description="where the voxels of NIfTI files lie whose sform and qform disagree; without it such files are "
            "refused. By default the site's own `nifti_affine`"
        ),
    ] = None
    patients: Annotated[
        Annotated[str, Field(min_length=1, max_length=200)] | None,
        Field(
            description="the name of these patients in the ledger, and so of their budget; data sets of the same patients "
            "share one"
        ),
    ] = None


def check_apart(path: Path, datasets: Mapping[str, DatasetConfig]) -> None:
    """Raise ConfigError for two data sets of the same files but not of the same `patients`: their budget would count twice."""
    for (one, first), (other, second) in combinations(datasets.items(), 2):
        apart = (first.patients or one) != (second.patients or other)
        if apart and _meet(_place(first.datalist), _place(second.datalist)):
            what = f"names the files of {one!r} again, so one budget would count as two"
            raise ConfigError(f"{path}: datasets.{other}.datalist: {what}; give both the same `patients`")


def _place(datalist: Path) -> Path:
    """Return the file of a data list, or the folder of JSONL lists, resolved."""
    found = datalist.resolve()
    return found.parent if found.suffix == ".jsonl" else found


def _meet(one: Path, other: Path) -> bool:
    """Tell whether two lists are the same file, or one lies in the folder that the other is."""
    try:
        same = one.samefile(other)
    except (OSError, ValueError):  # one is not there yet
        same = False
    folders = ((a, b) for a, b in ((one, other), (other, one)) if a.is_dir() or has_texts(a))
    return same or one == other or any(b.is_relative_to(a) for a, b in folders)


def choose(
    datasets: Mapping[str, DatasetConfig], alone: DatasetConfig | None, wanted: str | None, who: str
) -> tuple[str | None, DatasetConfig | None]:
    """Return the data set that a job gets of a site, and its name; None where there is none, or one `alone` without a name.

    Raises RefusedError for a name that the site `who` does not have, and for no name at a site with several.
    """
    if wanted is None and len(datasets) <= 1:
        name = next(iter(datasets), None)
        return name, datasets[name] if name is not None else alone
    if wanted is not None and wanted in datasets:
        return wanted, datasets[wanted]
    has = f"it has {', '.join(datasets)}" if datasets else "it has one without a name" if alone else "it has none"
    asked = f"the job wants data set {wanted!r}" if wanted else "the job names none of several data sets (data.dataset)"
    remedy = "name it under `datasets:` of site.yaml" if wanted else "the job must name one"
    raise RefusedError(f"{who}: {asked}, {has}; {remedy}", Reason.DATASET)
