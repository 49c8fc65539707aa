"""DEeR: deviation eliminator and noise regulator.

Deviation eliminator (Algorithm 1): in phase B all sites hold the same frozen A and train B; in phase A the roles are swapped.
Then the mean of the factors equals the mean of the products exactly: (1/K) sum B_k A = B A. (Lines 7 and 12 print a sum; the
mean of Eq. 3 is meant.) Noise regulator (Theorem 2): clipping and noise act on the effective update, where the frozen factor is
public. privacy/mechanism.py says where the paper's own clipping does not hold.

Source: M. Zhu, A. Mao, J. Liu, Y. Yuan, "DEeR: Deviation Eliminating and Noise Regulating for Privacy-preserving Federated
Low-rank Adaptation", IEEE Transactions on Medical Imaging, 2025: Eq. 3, Algorithm 1, Theorem 2.
"""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from consilium.adapters.names import checked_lora_factor, factor
from consilium.core.errors import ConfigError
from consilium.core.lazy import torch
from consilium.core.messages import Tensors
from consilium.strategies.strategy import Role, ServerState, Strategy, Traits

SCHEDULES: dict[str, tuple[str, ...]] = {"100%": ("BA",), "75%": ("BA", "B", "BA", "A"), "50%": ("B", "A")}
"""For each share of exchanges that remains (the paper's Figure 7), the phases of successive rounds. The tuple repeats."""


@dataclass(frozen=True)
class DEeR(Strategy):
    """Train one factor at a time."""

    name: ClassVar[str] = "deer"

    schedule: Annotated[
        Literal["100%", "75%", "50%"], Field(description="the share of exchanges that remains (the paper's Figure 7)")
    ] = "100%"
    regulator: Annotated[bool, Field(description="off: plain clipping and noise on the factor (the paper's ablation)")] = True
    rebalance: Annotated[
        bool,
        Field(
            description="after each phase the server replaces the factors by (R A, B R^-1), so that the next public factor "
            "is orthonormal. The product B A is unchanged, the regulator's noise becomes isotropic, and the factor's "
            "condition number cannot grow from round to round. Other tensors (a head) train in all phases"
        ),
    ] = False
    eliminator: Annotated[
        bool,
        Field(
            description="off (the paper's other ablation, Table IV): both factors are exchanged at once, as in FedIT. The "
            "regulator stays, with the factors that all sites were sent as the public ones. Where a public factor "
            "is 0 (B in the first round) the update of the other factor is not sent, so A moves from the second round on"
        ),
    ] = True

    def __post_init__(self) -> None:
        if not self.eliminator and (self.schedule != "100%" or self.rebalance):
            field, value = ("rebalance", "true") if self.rebalance else ("schedule", repr(self.schedule))
            raise ConfigError(
                f"strategy.{field}: {value} takes phases of one factor each, and eliminator false has none; leave it out"
            )

    @property
    def traits(self) -> Traits:
        """See Strategy. A round has one phase for each factor that its schedule trains; without `eliminator` it has one phase.

        With `rebalance` the factors' basis changes after each phase, so an optimizer cannot keep its moments.
        """
        phases = tuple(map(len, SCHEDULES[self.schedule])) if self.eliminator else (1,)
        return Traits(phases=phases, fixed_basis=not self.rebalance, paired_factors=self.regulator)

    def role(self, name: str, round: int, phase: int) -> Role:
        """Return FROZEN for the factor that this phase does not train, SHARED for all other tensors."""
        which = checked_lora_factor(name, self.name)
        return Role.FROZEN if self.eliminator and which not in (None, self._trained_factors(round)[phase]) else Role.SHARED

    def aggregate(self, state: ServerState, results: Tensors) -> ServerState:
        """Return the next state: the mean update added and, with `rebalance`, the factors rebalanced for the next phase."""
        after = super().aggregate(state, results)
        if not self.rebalance:
            return after
        frozen = "A" if self._trained_factors(after.round)[after.phase] == "B" else "B"
        return replace(after, shared=after.shared | orthonormalize_frozen_factor(after.shared, frozen))

    def _trained_factors(self, round: int) -> str:
        """Return the factors that the phases of a round train, in order, such as "BA"."""
        rounds = SCHEDULES[self.schedule]
        return rounds[round % len(rounds)]


def orthonormalize_frozen_factor(shared: Tensors, frozen: str) -> Tensors:
    """Return the factors of every layer with the factor `frozen` ("A" or "B") orthonormal and the product B A unchanged.

    With A^T = Q R, A becomes Q^T and B becomes B R^T; for B the same with the roles swapped. A layer whose frozen factor is
    rank-deficient is left out of the result.
    """
    moved: Tensors = {}
    for layer in (n.removesuffix(".lora_A") for n in shared if factor(n) == "A"):
        a, b = shared[f"{layer}.lora_A"], shared[f"{layer}.lora_B"]
        q, r = torch.linalg.qr((a.T if frozen == "A" else b).double())
        diagonal = r.diagonal().abs()
        if len(diagonal) < a.shape[0] or float(diagonal.min()) <= 1e-6 * float(diagonal.max()):
            continue
        new_a, new_b = (q.T, b.double() @ r.T) if frozen == "A" else (r @ a.double(), q)
        moved |= {f"{layer}.lora_A": new_a.to(a.dtype), f"{layer}.lora_B": new_b.to(b.dtype)}
    return moved
