"""Centralized reference: the same adapters trained on all sites' data in one place, in rounds of the same length.

Only possible where data may be pooled, so only in the in-process simulation; it is the bound federated methods aim at.
"""

from dataclasses import dataclass
from typing import ClassVar

from consilium.strategies.fedit import FedIT
from consilium.strategies.traits import Traits


@dataclass(frozen=True)
class Centralized(FedIT):
    """FedIT with a single pooled site; the simulation builds that site from all data lists."""

    name: ClassVar[str] = "centralized"
    traits = Traits(elementwise=True, pools_data=True)
