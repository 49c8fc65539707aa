"""The capabilities and needs that an algorithm declares, in one record. Checks, privacy plans and estimates read it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Interpolation:
    """The weight of a local adapter in a site's personalized model: `most` times a sample's similarity to the site's data.

    `examples`: the number of training records with which a sample is compared; with 0 the weight is `most` for every sample.
    `as_in_code`: the weight is 1 minus that product, similarities may be negative, and a fit sends no gradient through the
    frozen adapter; see strategies/feddpa.py.
    """

    most: float
    examples: int
    as_in_code: bool = False


@dataclass(frozen=True)
class Traits:
    """The capabilities and needs of one algorithm with its settings. The defaults are those of federated averaging.

    Server:
    - `needs`: what the server must see. "sums": weighted sums, so noise, masks or encryption may hide single results. "sites":
      each site's result.
    - `phases`: how many exchanges each round has; the tuple repeats. `warm_up`: rounds whose roles differ from later ones.
    - `pools_data`: the data of all sites are pooled (the centralized reference).
    - `needs_base_weights`: `Strategy.start` reads the base's weights.
    - `elementwise`: each tensor is averaged separately, so the algorithm can also average DoRA's row lengths.
    - `fixed_basis`: the basis of a tensor is the same in every round, so an optimizer may keep its moments.
    - `paired_factors`: clipping and noise act on a product B A, with the other factor as it was sent; see privacy/mechanism.py.
    - `measured`: tensors that are shared but measured instead of trained.
    - `site_matrices`: `ServerState.matrices` are sites x sites and are drawn in every round.

    Adapter:
    - `parts`: modules added to the model beside the job's adapter; see adapters/strategy_modules.py.
    - `ranks_differ`: ranks differ by site and layer, which needs the adapter kind dual_rank. `one_rank`: the algorithm can also
      run at one rank everywhere, on plain LoRA. `sends_frozen_ranks`: sites receive frozen ranks beside those they train.
    - `scales_adapter`: a payload's scalar "scaling" multiplies the adapter's alpha / rank.
    - `skips_blocks`: a site runs without the blocks of the base whose tensors it was not sent.

    Client:
    - `fits`: how often `local_update` calls `fit` in a phase. DP-SGD charges this many; the trainer refuses more.
    - `fits_only`: an overridden `local_update` reads records only through plain `fit`, which DP-SGD covers. Without this trait
      record- and patient-level privacy refuse such an algorithm. With it the trainer refuses all other reading of records.
    - `refuses_records`: why record- and patient-level privacy do not cover the algorithm (field, value, remedy); "" if they do.
    - `probe_fraction`: the share of the training data on which `Trainer.probe` reads gradients.
    - `interpolation`: how the personalized model weighs a local adapter. `fits_after_last_round`: `local_update` runs once more
      after the last round, for the personalized model; its result stays at the site.

    Presentation: `label`: the name in comparisons, by default the strategy's; `warnings`: lines printed before a run;
    `variants`: the settings for which `consilium cost` shows a row each.
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
    label: str = ""
    warnings: tuple[str, ...] = ()
    variants: tuple[Mapping[str, Any], ...] = ({},)

    def phases_of(self, round: int) -> int:
        """Return the number of phases (exchanges) in a round."""
        return self.phases[round % len(self.phases)]

    def phase_schedule(self, first: int = 0, rounds: int | None = None) -> list[tuple[int, int]]:
        """Return all (round, phase) of `rounds` rounds from `first` on; by default those of the warm-up and one period."""
        last = first + rounds if rounds is not None else self.warm_up + len(self.phases)
        return [(round, phase) for round in range(first, last) for phase in range(self.phases_of(round))]
