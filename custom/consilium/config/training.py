"""The `training:` section of job.yaml."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from consilium.config.validation import ValidateConfig
from consilium.core.schema import Section, Seed


class TrainingConfig(Section):
    """Local training."""

    rounds: Annotated[int, Field(ge=1, le=100_000, description="rounds of the whole run")]
    local_epochs: Annotated[int, Field(ge=1, le=1000, description="passes over a site's training data in a round")] = 1
    local_steps: Annotated[
        Annotated[int, Field(ge=1, le=100_000)] | None,
        Field(description="optimizer steps in a round, instead of `local_epochs`"),
    ] = None
    batch_size: Annotated[int, Field(ge=1, le=65536, description="samples in a batch")] = 4
    accumulate: Annotated[int, Field(ge=1, le=4096, description="batches per optimizer step")] = 1
    optimizer: Annotated[Literal["adam", "adamw", "sgd"], Field(description="the optimizer at every site")] = "adam"
    optimizer_state: Annotated[
        Literal["fresh", "kept"],
        Field(description="`fresh`: empty in every round; `kept`: it stays at the site, which goes on with it"),
    ] = "fresh"
    lr: Annotated[float, Field(gt=0, le=1000, description="learning rate")] = 1e-4
    schedule: Annotated[
        Literal["constant", "cosine", "linear"],
        Field(
            description="`schedule` cosine and linear let the learning rate fall from `lr` to 0 within each round's local "
            "training, without warm-up"
        ),
    ] = "constant"
    weight_decay: Annotated[float, Field(ge=0, le=1000, description="the optimizer's weight decay")] = 0.0
    momentum: Annotated[float, Field(ge=0, lt=1, description="sgd only")] = 0.0
    precision: Annotated[Literal["auto", "bf16", "fp32"], Field(description="`auto` is bf16 where the GPU has it")] = "auto"
    gradient_checkpointing: Annotated[bool, Field(description="less memory for more time")] = False
    compile: Annotated[
        bool, Field(description="the model's blocks by torch.compile: the first step takes up to minutes, all others less")
    ] = False
    seed: Annotated[Seed, Field(description="with round and site it fixes every random choice but privacy noise")] = 0
    validation: Annotated[ValidateConfig, Field(alias="validate", description="when the validation split is scored")] = (
        ValidateConfig()
    )

    model_config = ConfigDict(serialize_by_alias=True)

    def validates(self, round: int, stage: str) -> bool:
        """Tell whether the validation split is scored in this round, counted from 0, by the model of this stage."""
        return stage in self.validation.stages and (round + 1) % self.validation.every == 0

    def steps_per_round(self, num_samples: int) -> int:
        """Return the optimizer steps of one round at a site with `num_samples` training samples."""
        if self.local_steps:
            return self.local_steps
        batches = -(-num_samples // self.batch_size)
        return self.local_epochs * -(-batches // self.accumulate)
