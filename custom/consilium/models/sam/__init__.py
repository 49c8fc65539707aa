"""SAM: a frozen one, for segmentation."""

from typing import Annotated, Literal

from pydantic import Field

from consilium.schema import Section, Sha256


class SamConfig(Section):
    """A frozen SAM, for segmentation. `checkpoint` may start with ${SITE}, the site's checkpoint folder."""

    name: Literal["sam"] = "sam"
    variant: Literal["tiny", "vit_b", "vit_l", "vit_h"]
    checkpoint: str | None = None
    checkpoint_sha256: Sha256 | None = None
    image_size: Annotated[int, Field(ge=16, le=4096, description="pixels, a multiple of the variant's patch size")]
    attention: Literal["fused", "original"] = "fused"
