"""Centralized reference: the same adapters trained on all sites' data in one place, in rounds of the same length.

It needs pooled data, so it runs in the in-process simulation only. Its score is the bound that federated methods aim at.
"""

from dataclasses import dataclass
from typing import ClassVar

from consilium.strategies.fedit import FedIT
from consilium.strategies.strategy import Traits


@dataclass(frozen=True)
class Centralized(FedIT):
    """FedIT with a single pooled site; the simulation builds that site from all data lists."""

    name: ClassVar[str] = "centralized"
    traits = Traits(elementwise=True, pools_data=True)
