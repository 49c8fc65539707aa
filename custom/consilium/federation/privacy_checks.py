"""What a job's privacy does not go with, once its adapter is known: what a strategy does that no noise covers."""

from pathlib import Path
from typing import TYPE_CHECKING

from consilium.adapters.parts import FEATURE_SHIFT
from consilium.errors import ConfigError
from consilium.federation.saved_model import keeps_local
from consilium.strategies.strategy import Strategy

if TYPE_CHECKING:
    from consilium.federation.build import Job


def check_privacy(job: "Job", source: Path | str) -> None:
    """Raise ConfigError for privacy that the strategy would undo."""
    privacy, strategy = job.config.privacy, job.strategy
    if privacy is None:
        return
    if strategy.pools_data:
        raise ConfigError(f"{source}: privacy: strategy {strategy.name!r} pools all sites' data; remove the section")
    if job.config.dpsgd and (why := strategy.refuses_records() or _uncharged(job) or _unsummed(job)):
        raise ConfigError(f"{source}: {why}")
    parts = [(name, getattr(job.config.task, name, None)) for name in ("slices", "tiles")]
    if thinned := [name for name, part in parts if job.config.dpsgd and part and part.empty != "keep"]:
        what = f"the number of {privacy.unit}s leaves without noise, and must not tell how many of them show a label"
        raise ConfigError(f"{source}: task.{thinned[0]}.empty: {what}; write keep")
    if privacy.unit == "site" and strategy.needs == "sites" and privacy.trust != "local":
        raise ConfigError(
            f"{source}: privacy.trust: {privacy.trust!r}: strategy {strategy.name!r} compares single sites' updates, so noise "
            "on their sum protects nothing; use local"
        )


def _uncharged(job: "Job") -> str | None:
    """Return why record-level privacy would not cover what a strategy does, should it not say so itself."""
    strategy, blend = job.strategy, job.strategy.blend(closing=True)
    uneven = any(len(strategy.passes(job.initial, *p)) != len(strategy.passes((), *p)) for p in strategy.places())
    looks = strategy.looked_at or strategy.closing_passes(job.initial) or (blend and blend.examples)
    if not (uneven or looks or FEATURE_SHIFT in strategy.parts):
        return None
    return f"strategy.name: {strategy.name!r} does more with records than privacy.unit record charges; use fedit"


def _unsummed(job: "Job") -> str | None:
    """Return why a strategy's training is no step of DP-SGD over all sites, None where it is or the sites train alone."""
    strategy, name = job.strategy, f"strategy.name: {job.strategy.name!r}"
    if job.config.dpsgd is None or job.config.dpsgd.trust == "local":
        return None
    if keeps_local(strategy, job.initial):
        return f"{name} keeps tensors at their sites, and DP-SGD over all sites trains shared ones only; use fedit"
    hooks = ("receive", "before_training", "passes", "regularizer", "drift", "upload", "scaling", "after_training", "merge")
    own = [hook for hook in hooks if getattr(type(strategy), hook) is not getattr(Strategy, hook)]
    if own or strategy.needs == "sites" or strategy.parts or strategy.ranks_differ:
        what = f"({own[0]}) " if own else ""
        return f"{name} does more {what}than to sum gradients, which is all that DP-SGD over all sites does; use fedit"
    return None
