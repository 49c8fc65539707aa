"""What an algorithm states about itself, in one record. Checks, plans and estimates read it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Interpolation:
    """The share of a local adapter in a site's personalized model: `most`, times each sample's similarity to the site's data.

    `examples`: how many training records a sample is compared with; with 0 the share is `most` for every sample. `as_in_code`:
    the share is 1 minus that, similarities may be negative, and a fit sends no gradient through the frozen adapter; see
    strategies/feddpa.py.
    """

    most: float
    examples: int
    as_in_code: bool = False


@dataclass(frozen=True)
class Traits:
    """The capabilities and needs of one algorithm with its settings. The defaults are those of federated averaging.

    Server:
    - `needs`: what the server must see. "sums": weighted sums, so noise, masks or encryption may hide the sites. "sites": every
      site's result.
    - `phases`: how many exchanges each round has; the tuple repeats. `warm_up`: rounds whose roles differ from later ones.
    - `pools_data`: all data lie in one place (the centralized reference).
    - `needs_base_weights`: `Strategy.start` reads the base's weights.
    - `elementwise`: it averages each tensor by itself, so also DoRA's lengths of rows.
    - `fixed_basis`: a tensor's numbers mean the same in every round, so an optimizer may remember them.
    - `paired_factors`: clipping and noise act on a product B A, with the other factor as it was sent; see privacy/mechanism.py.
    - `measured`: tensors that are shared and counted, not trained.
    - `site_matrices`: `ServerState.matrices` are sites x sites and worth a picture every round.

    Adapter:
    - `parts`: what it adds to the model beside the job's adapter; see adapters/parts.py.
    - `ranks_differ`: ranks differ by site and layer, which takes the dual-rank adapter. `one_rank`: it may also run at one rank
      everywhere, on plain LoRA. `sends_frozen_ranks`: sites receive frozen ranks beside those they train.
    - `scales_adapter`: a payload's scalar "scaling" multiplies the adapter's alpha / rank.
    - `skips_blocks`: a site runs without the blocks of the base whose tensors it was not sent.

    Client:
    - `fits`: how often `local_update` calls `fit` in a phase. DP-SGD charges so many, and a trainer refuses more.
    - `fits_only`: an own `local_update` reads records through plain `fit` alone, which DP-SGD covers. Without it record- and
      patient-level privacy refuse an own `local_update`; with it the trainer refuses everything else that reads records.
    - `refuses_records`: why record- and patient-level privacy do not cover it (field, value, remedy), "" where they do.
    - `probe_fraction`: the share of the training data that gradients are read of before training; see `Trainer.probe`.
    - `interpolation`: how the personalized model weighs a local adapter. `fits_after_last_round`: `local_update` runs once more
      at the end, for the personalized model; nothing of it leaves the site.
    - `upload_scalars`: names of the scalars that a site uploads beside its tensors.

    Presentation: `label` in comparisons, by default the name; `warnings` before a run, a line each; `variants`: the settings
    that a comparison of costs shows.
    """

    needs: Literal["sums", "sites"] = "sums"
    phases: tuple[int, ...] = (1,)
    warm_up: int = 0
    pools_data: bool = False
    needs_base_weights: bool = False
    elementwise: bool = False
    fixed_basis: bool = True
    paired_factors: bool = False
    measured: frozenset[str] = frozenset()
    site_matrices: bool = False
    parts: frozenset[str] = frozenset()
    ranks_differ: bool = False
    one_rank: bool = False
    sends_frozen_ranks: bool = False
    scales_adapter: bool = False
    skips_blocks: bool = False
    fits: int = 1
    fits_only: bool = False
    refuses_records: str = ""
    probe_fraction: float = 0.0
    interpolation: Interpolation | None = None
    fits_after_last_round: bool = False
    upload_scalars: frozenset[str] = frozenset()
    label: str = ""
    warnings: tuple[str, ...] = ()
    variants: tuple[Mapping[str, Any], ...] = ({},)

    def phases_of(self, round: int) -> int:
        """Return how many exchanges a round has."""
        return self.phases[round % len(self.phases)]

    def role_schedule(self, first: int = 0, rounds: int | None = None) -> list[tuple[int, int]]:
        """Return (round, phase) of `rounds` rounds from `first` on; by default those of the warm-up and of one period."""
        last = first + rounds if rounds is not None else self.warm_up + len(self.phases)
        return [(round, phase) for round in range(first, last) for phase in range(self.phases_of(round))]
