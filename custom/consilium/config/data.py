"""Sections of job.yaml for data that the job brings along."""

from typing import Annotated, Literal

from pydantic import Field

from consilium.schema import Section, Share

PHANTOMS = {
    "fundus": "segmentation",
    "nuclei": "segmentation",
    "organ": "segmentation",
    "cells": "classification",
    "sentences": "language",
}
"""The task each kind of generated data is for."""


class PhantomConfig(Section):
    """Generated data for a site that has none of its own: counts per split and the strength of both shifts (0 to 1).

    `annotation` is the shift of labels: how raters draw masks, and for `cells` and `sentences` how unevenly a site sees the
    classes. An `organ` is a volume with a lesion in it, a study per count; PNG are pictures of all its slices.
    """

    kind: Literal["fundus", "nuclei", "organ", "cells", "sentences"]
    training: Annotated[int, Field(ge=1, le=100_000)] = 24
    validation: Annotated[int, Field(ge=0, le=100_000)] = 8
    test: Annotated[int, Field(ge=0, le=100_000)] = 16
    appearance: Share = 0.7
    annotation: Share = 0.7
    files: Annotated[Literal["nifti", "dicom", "png"], Field(description="what an organ's volumes are written as")] = "nifti"


class DataConfig(Section):
    """Data the job brings along; a site's own data list always wins."""

    phantoms: PhantomConfig | None = None
