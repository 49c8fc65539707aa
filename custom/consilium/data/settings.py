"""A job's settings for reading pictures: planes of volumes, tiles, window, crop and resize."""

import json
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from consilium.core.schema import Section, Share

Value = int | str
"""A label: the value of voxels, or the name of a region."""
NiftiAffine = Literal["sform", "qform"]
"""Which of the two transforms of a NIfTI file gives the position of its voxels."""
Axis = Literal["stored", "axial", "coronal", "sagittal"]
"""Orientation of a volume's planes. `stored`: planes across the file's last axis, in the file's order."""


class SlicesConfig(Section):
    """The planes of a volume whose entry in the data list names no plane.

    `every` and `empty` thin out the training split only, because scores of a volume need all its planes.
    """

    axis: Annotated[Axis, Field(description="orientation of the planes in the patient, or the file's last axis (stored)")] = (
        "stored"
    )
    every: Annotated[int, Field(ge=1, le=10_000, description="step between training planes: 2 trains on every second")] = 1
    empty: Annotated[
        Literal["keep", "drop"] | Share,
        Field(description="training planes without any label: keep, drop, or the share to keep"),
    ] = "keep"


class TilesConfig(Section):
    """The tiles of a large picture or a slide whose entry in the data list names no tile.

    The last tile of a row or column is moved back to end at the edge. `empty` thins out the training split only.
    """

    size: Annotated[int, Field(ge=16, le=8192, description="pixels per side of a tile")] = 512
    stride: Annotated[int | None, Field(ge=8, le=8192, description="pixels from one tile to the next; default: the size")] = (
        None
    )
    level: Annotated[int, Field(ge=0, le=20, description="level of a slide that is read; 0 is the finest")] = 0
    empty: Annotated[
        Literal["keep", "drop"] | Share, Field(description="training tiles without any label: keep, drop, or the share to keep")
    ] = "keep"

    @model_validator(mode="after")
    def _check_stride(self) -> Self:
        if self.stride is not None and self.stride > self.size:
            raise ValueError(f"stride: {self.stride} is over size {self.size}, and the pixels between tiles would be left out")
        return self


class WindowConfig(Section):
    """Values from `center` - `width` / 2 (black) to `center` + `width` / 2 (white), in the file's unit, such as HU."""

    center: Annotated[float, Field(ge=-1e6, le=1e6, description="the value shown as mid-grey, in the file's unit, such as HU")]
    width: Annotated[float, Field(gt=0, le=1e6, description="the range from black to white, in the file's unit")]


class PictureSettings(Section):
    """How a task reads its pictures. The fields' descriptions say what each setting does."""

    slices: Annotated[SlicesConfig, Field(description="planes of a volume whose entry names no slice")] = SlicesConfig()
    tiles: Annotated[
        TilesConfig | None, Field(description="cut pictures larger than a tile into tiles; without it, each is one sample")
    ] = None
    window: Annotated[
        WindowConfig | None,
        Field(
            description="default: the window of a DICOM file; without one, 8-bit values stay, and other values are scaled by"
            " the 0.5 and 99.5 percentiles of the whole picture or volume"
        ),
    ] = None
    resize: Annotated[
        Literal["stretch", "pad"],
        Field(description="stretch to a square, or keep the aspect ratio and pad at the right and the bottom, as SAM does"),
    ] = "stretch"
    crop: Annotated[
        Annotated[int, Field(ge=16, le=8192)] | None,
        Field(
            description="pixels of a square crop. Training and scores see only this part of each picture. A side that is "
            "shorter stays whole. The file's name fixes the crop's position, for training together with `training.seed`"
        ),
    ] = None
    resample_masks: Annotated[
        bool,
        Field(description="resample a mask on another grid to its image's grid, by the nearest voxel, instead of refusing it"),
    ] = False

    @model_validator(mode="after")
    def _check_crop_or_tiles(self) -> Self:
        if self.crop is not None and self.tiles is not None:
            raise ValueError("crop: takes one part of a picture, and tiles takes all of them; write one of the two")
        return self


DEFAULTS = PictureSettings()


def reading_key(kind: str, settings: PictureSettings, size: int, classes: object = None) -> str:
    """Return all settings that decide how a task of this `kind` reads pictures, as a text. Equal texts give equal samples."""
    return json.dumps(
        [kind, settings.model_dump(include=set(PictureSettings.model_fields) - {"slices"}), size, classes],
        sort_keys=True,
        default=str,
    )
