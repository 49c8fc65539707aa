"""The `server:` section of job.yaml: the mean of the sites' updates, and the step along it."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from consilium.core.schema import Positive, Section

_USED = {
    "lr": ("momentum", "adam", "yogi"),
    "beta1": ("momentum", "adam", "yogi"),
    "beta2": ("adam", "yogi"),
    "tau": ("adam", "yogi"),
}
"""The optimizers that use each field."""
Beta = Annotated[float, Field(ge=0, lt=1)]


class ServerConfig(Section):
    """Which mean of the sites' updates is taken, and which step along it. Without the section: the weighted mean, as it is."""

    optimizer: Annotated[
        Literal["momentum", "adam", "yogi"] | None,
        Field(description="FedAvgM, FedAdam or FedYogi; its state is in the server's checkpoint"),
    ] = None
    lr: Annotated[Positive | None, Field(description="the server's learning rate; by default 1 for `momentum`, else 0.01")] = (
        None
    )
    beta1: Annotated[Beta, Field(description="decay of the momentum")] = 0.9
    beta2: Annotated[Beta, Field(description="decay of the squares (`adam`, `yogi`)")] = 0.99
    tau: Annotated[Positive, Field(description="added to the root of the squares (`adam`, `yogi`)")] = 1e-3
    mean: Annotated[
        Literal["weighted", "median", "trimmed"],
        Field(description="`median` and `trimmed`, number by number, bound what one site can do; each site counts once"),
    ] = "weighted"
    trim: Annotated[float, Field(gt=0, lt=0.5, description="`trimmed`: the share of sites left out at each end")] = 0.1

    @property
    def step_size(self) -> float:
        """The learning rate, given or by default."""
        return self.lr if self.lr is not None else 1.0 if self.optimizer == "momentum" else 0.01

    @property
    def robust(self) -> bool:
        """Whether the mean needs every site's update by itself."""
        return self.mean != "weighted"

    @model_validator(mode="after")
    def _uses_all(self) -> Self:
        """Raise ValueError for a field that would do nothing. A default is let through: a run's own job.yaml has all fields."""
        given = {name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default}
        for name in _USED:
            if name in given and self.optimizer not in _USED[name]:
                kinds = " or ".join(_USED[name])
                raise ValueError(f"{name}: {getattr(self, name)} is of optimizer {kinds}; name one of them, or leave it out")
        if "trim" in given and self.mean != "trimmed":
            raise ValueError(f"trim: {self.trim} is of mean trimmed; write that, or leave it out")
        return self
