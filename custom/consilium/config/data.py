"""Sections of job.yaml for data that the job brings along."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from consilium.core.schema import Section, Share

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
