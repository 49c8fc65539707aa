"""The `data:` section of job.yaml, the `datasets:` section of site.yaml, and the choice of a data set for a job."""

import re
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, StrictInt, StrictStr, model_validator

from consilium.core.errors import ConfigError, Reason, RefusedError, raise_first
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
"""The task that each kind of generated data is for."""


class PhantomConfig(Section):
    """Generated data for sites without data of their own: the counts per split, and the strength of two shifts (0 to 1).

    An `organ` is a volume with a lesion, one study per sample. As PNG its slices are written as pictures.
    """

    kind: Annotated[
        Literal["fundus", "nuclei", "organ", "cells", "sentences", "codes"],
        Field(description="the kind of generated pictures, volumes or texts"),
    ]
    training: Annotated[int, Field(ge=1, le=100_000, description="samples to train on")] = 24
    validation: Annotated[int, Field(ge=0, le=100_000, description="samples to validate on")] = 8
    test: Annotated[int, Field(ge=0, le=100_000, description="samples to test on")] = 16
    appearance: Annotated[Share, Field(description="strength of the shift in the appearance of pictures between sites")] = 0.7
    annotation: Annotated[
        Share,
        Field(
            description="strength of the shift of labels between sites: how raters draw masks; for `cells` and texts how "
            "unevenly the classes, or the codes, are distributed"
        ),
    ] = 0.7
    classes: Annotated[
        Annotated[int, Field(ge=1, le=5)] | None,
        Field(
            description="how many of the five kinds of cells are in a site's training data; sites 1, 2, ... take them in "
            "turn, and every site's test split has all five"
        ),
    ] = None
    files: Annotated[Literal["nifti", "dicom"], Field(description="the file format of an organ's volumes")] = "nifti"
    groups: Annotated[
        Annotated[int, Field(ge=1, le=10_000)] | None,
        Field(
            description="the number of groups with equal shifts; sites 1, 2, ... are assigned to them in turn; by default "
            "all sites' shifts differ"
        ),
    ] = None

    @model_validator(mode="after")
    def _check_fields_of_kind(self) -> Self:
        problems = {
            "groups: sites that write texts have none; leave it out": self.groups and PHANTOMS[self.kind] == "language",
            f"classes: {self.kind} have no mix of classes; leave it out, or take kind cells": (
                self.classes is not None and self.kind != "cells"
            ),
        }
        raise_first(problems, ValueError)
        return self


class DataConfig(Section):
    """Generated data for sites without a data list of their own, or the name of a data set that every site has."""

    phantoms: Annotated[PhantomConfig | None, Field(description="generated data for sites that have none of their own")] = None
    dataset: Annotated[
        DatasetName | None,
        Field(description="the name of the data set to use at sites with several; every site must have one of this name"),
    ] = None
    most_training: Annotated[
        Annotated[int, Field(ge=1, le=1_000_000)] | None,
        Field(
            description="a site trains on at most this many samples of its list (a volume or a slide is one sample), drawn "
            "by the job's seed without regard to classes. The samples of a smaller number are a subset of those of a "
            "larger one, for learning curves"
        ),
    ] = None

    @model_validator(mode="after")
    def _check_one_source(self) -> Self:
        if self.phantoms is not None and self.dataset is not None:
            raise ValueError("a data set that sites must have, and phantoms for sites that have none; give one of them")
        return self


# datasets --------------------------------------------------------------------------------------------------------------
# A site's data sets: the `datasets:` section of site.yaml, and the choice of one for a job.

LabelValue = Annotated[StrictInt, Field(ge=-(2**31), lt=2**31)] | Annotated[StrictStr, Field(min_length=1, max_length=200)]
Mapped = Annotated[tuple[ClassName, ...], Field(max_length=MOST_CLASSES)]
_WHOLE = re.compile(r"-?(0|[1-9][0-9]{0,9})")


def _parse_label_map(value: Any) -> Any:
    """Return a label map with every single class as a list, and with numeric text keys (from JSON) as numbers."""
    if not isinstance(value, Mapping):
        return value
    found = {
        int(key) if isinstance(key, str) and _WHOLE.fullmatch(key) else key: [names] if isinstance(names, str) else names
        for key, names in value.items()
    }
    if len(found) < len(value):
        raise ValueError("every label once; one is there as a number and as a text")
    return found


LabelMap = Annotated[dict[LabelValue, Mapped], Field(min_length=1, max_length=4096), BeforeValidator(_parse_label_map)]


class DatasetConfig(Section):
    """One of a site's data sets."""

    datalist: Annotated[Path, Field(description="the data set's data list, in the forms of the site's `datalist`")]
    labels: Annotated[
        LabelMap | None,
        Field(
            description="maps the site's labels (a mask's value, a DICOM region's name, a picture's class) to the job's "
            "class, or to a list of classes. An empty list means background; a picture class with an empty list is left "
            "out. Classes that a job does not have are ignored, because several jobs may use the map. Names are "
            "printable, without /"
        ),
    ] = None
    annotated: Annotated[
        Mapped | None,
        Field(
            description="the classes that the masks show, for entries of the list that do not say; by default all classes of "
            "the job. Names are printable, without /"
        ),
    ] = None
    nifti_affine: Annotated[
        NiftiAffine | None,
        Field(
            description="which affine positions the voxels of NIfTI files whose sform and qform disagree; by default the "
            "site's `nifti_affine`, and without either such files are refused"
        ),
    ] = None
    patients: Annotated[
        Annotated[str, Field(min_length=1, max_length=200)] | None,
        Field(
            description="the name of these patients in the privacy ledger, which has one budget per name; give data sets of "
            "the same patients the same name"
        ),
    ] = None


def check_shared_files(path: Path, datasets: Mapping[str, DatasetConfig]) -> None:
    """Raise ConfigError for two data sets with the same files but different `patients`, which would get two budgets."""
    for (one, first), (other, second) in combinations(datasets.items(), 2):
        apart = (first.patients or one) != (second.patients or other)
        if apart and _overlap(_resolve_list_path(first.datalist), _resolve_list_path(second.datalist)):
            raise ConfigError(
                f"{path}: datasets.{other}.datalist: names the files of {one!r} again, so one budget would count as two; give "
                "both the same `patients`"
            )


def _resolve_list_path(datalist: Path) -> Path:
    """Return the resolved path of a data list, or of the folder that holds JSONL lists."""
    found = datalist.resolve()
    return found.parent if found.suffix == ".jsonl" else found


def _overlap(one: Path, other: Path) -> bool:
    """Return whether two paths of data lists are the same file, or one is a folder that contains the other."""
    try:
        same = one.samefile(other)
    except (OSError, ValueError):  # one is not there yet
        same = False
    folders = ((a, b) for a, b in ((one, other), (other, one)) if a.is_dir() or has_texts(a))
    return same or one == other or any(b.is_relative_to(a) for a, b in folders)


def choose_dataset(
    datasets: Mapping[str, DatasetConfig], unnamed: DatasetConfig | None, wanted: str | None, who: str
) -> tuple[str | None, DatasetConfig | None]:
    """Return (name, data set) of the data set at a site that a job uses.

    `datasets`: the site's named data sets. `unnamed`: its single data set without a name. `wanted`: the name in the job.
    Without a data set return (None, None). Raises RefusedError if the site `who` has no such name, or has several and the job
    names none.
    """
    if wanted is None and len(datasets) <= 1:
        name = next(iter(datasets), None)
        return name, datasets[name] if name is not None else unnamed
    if wanted is not None and wanted in datasets:
        return wanted, datasets[wanted]
    has = f"it has {', '.join(datasets)}" if datasets else "it has one without a name" if unnamed else "it has none"
    asked = f"the job wants data set {wanted!r}" if wanted else "the job names none of several data sets (data.dataset)"
    remedy = "name it under `datasets:` of site.yaml" if wanted else "the job must name one"
    raise RefusedError(f"{who}: {asked}, {has}; {remedy}", Reason.DATASET)
