"""The noise of published tables.

`calibration: paper` (site level) reproduces the noise of M. Zhu et al., "DEeR", IEEE TMI 2025, whose code asks Opacus' RDP
accountant for the sigma of so many *batches of images* at delta 1 / K, then clips each of a release's L tensors to C and lets
each of K sites add sigma C / sqrt(K) (Eq. 5). What leaves are sites' updates, so that is one Gaussian mechanism a release of
joint sensitivity C sqrt(L): of multiplier sigma / sqrt(K L) against everyone (trust local), sigma / sqrt(L) where the server
adds the whole (central). That is what plan, ledger and budget count. Ours: tensors with a peer are clipped as effective
updates, as everywhere here; the paper clips factors, for which there is no such bound.
"""

import warnings
from functools import lru_cache

from consilium.config.privacy import SiteLevelDpConfig
from consilium.core.errors import ConfigError


def paper_sigma(privacy: SiteLevelDpConfig, batch: int, steps: int) -> float:
    """Return Opacus' sigma of so many `steps` at the sample rate batch / samples. Raises ConfigError where it has none."""
    assert privacy.epsilon is not None
    assert privacy.sites is not None
    assert privacy.samples is not None
    try:
        return _opacus_sigma(privacy.epsilon, 1 / privacy.sites, min(1.0, batch / privacy.samples), steps)
    except ValueError:
        what = f"{privacy.epsilon}: Opacus has no noise for it (calibration paper); ask for more, or fewer rounds"
        raise ConfigError(f"privacy.epsilon: {what}") from None


@lru_cache(maxsize=64)
def _opacus_sigma(epsilon: float, delta: float, rate: float, steps: int) -> float:
    """Return what Opacus finds, once a process: its search takes seconds, and server, guard and site each make a plan."""
    from opacus.accountants.utils import get_noise_multiplier

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its grid of orders
        found = get_noise_multiplier(
            target_epsilon=epsilon, target_delta=delta, sample_rate=rate, steps=steps, accountant="rdp"
        )
    return float(found)


def printed(privacy: SiteLevelDpConfig) -> str:
    """Return the epsilon that the paper would print."""
    assert privacy.epsilon is not None
    assert privacy.sites is not None
    return f"epsilon {privacy.epsilon:g} at delta {1 / privacy.sites:.3g}"
