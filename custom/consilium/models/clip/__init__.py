"""CLIP-like vision towers with a trained head, for classification."""

from typing import Annotated, Literal

from pydantic import Field

from consilium.schema import Section, Sha256


class ClipConfig(Section):
    """A frozen CLIP vision tower with a trained head, for classification. `checkpoint` as for SAM, see models/clip.py."""

    name: Literal["clip"]
    variant: Literal["tiny", "biomedclip", "clip"]
    checkpoint: str | None = None
    checkpoint_sha256: Sha256 | None = None
    image_size: Annotated[int, Field(ge=16, le=4096, description="pixels, a multiple of the variant's patch size")]
