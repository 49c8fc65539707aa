"""Sizes, times and privacy statements of a page, in words."""

import time
from collections.abc import Mapping
from typing import Any

from consilium.config.privacy import PrivacyConfig
from consilium.core.sanitize import shown
from consilium.privacy.plan import not_private
from consilium.report.plain_files import finite
from consilium.report.run_record import RunRecord

NONE = (
    "This job has no differential privacy. Updates left the sites as trained. The guard let only shared tensors and declared "
    "numbers pass, but what can be inferred from them has no proven bound."
)
BY_UNIT = (
    "{unit}-level differential privacy: each site trains by DP-SGD on its own data, so noise and epsilon differ by site. The "
    "server does not know them; each site's own report does."
)
SCORES = (
    "Scores are not covered by it. In a simulation no noise protects them. In a federation a private job's scores stay at the "
    "site, unless its administrator shares them."
)
FACTS = {name: name for name in ("unit", "adjacency", "trust", "accountant", "calibration")}
FACTS |= {"clip": "clip (C)", "noise_multiplier": "noise multiplier (sigma)", "releases": "releases"}
"""Headings of a plan's fields, in their order."""
Statement = tuple[list[str], list[tuple[str, str]]]
"""Sentences, and facts as pairs of texts."""


def size(count: float) -> str:
    """Return a number of bytes in words."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= factor:
            return f"{count / factor:,.2f} {unit}"
    return f"{count:,.0f} B"


def stamp(seconds: float) -> str:
    """Return a time in words, in UTC."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
    except (ValueError, OverflowError, OSError):
        return "an impossible time"


def duration(seconds: float) -> str:
    """Return seconds in words."""
    return f"{seconds:.1f} s" if seconds < 90 else f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def statement(record: RunRecord) -> Statement:
    """Return a run's privacy: the promise, to whom, and the noise that it took."""
    if (private := record.config.privacy) is None:
        return [NONE], []
    if record.privacy is not None:
        sentences, facts = of_plan(record.privacy)
        return [*sentences, SCORES], facts
    sentences, facts = _unfinished(record, private)
    return [*([shown(not_private(record.seeded), 600)] if record.seeded else []), *sentences], facts


def _unfinished(record: RunRecord, private: PrivacyConfig) -> Statement:
    """Return what is known of the privacy of a run that has no privacy.json."""
    facts = [("unit", private.unit), ("adjacency", private.adjacency), ("trust", private.trust), ("clip", f"{private.clip:g}")]
    if private.unit != "site" and private.trust == "local":
        return [BY_UNIT.format(unit=private.unit.capitalize()), SCORES], facts
    spent = [value for line in record.of("concluded") if (value := finite(line.get("privacy/epsilon"))) is not None]
    facts += [("epsilon so far", f"{spent[-1]:.4g} at delta {private.delta:g}")] if spent else []
    return ["The run has not ended: what it promises is known at its end.", SCORES], facts


def of_plan(found: Mapping[str, Any]) -> Statement:
    """Return the claim of a privacy.json, or of a site's own plan, in a sentence, and its numbers."""
    facts = []
    for name, heading in FACTS.items():
        if name in found:
            value = finite(found[name])
            facts.append((heading, shown(found[name], 80) if value is None else f"{value:.4g}"))
    clip, multiplier = (finite(found.get(name)) for name in ("clip", "noise_multiplier"))
    if clip is not None and multiplier is not None and found.get("calibration") != "paper":
        noise = multiplier * clip * (2 if found.get("adjacency") == "replace" else 1)
        adds = {
            "local": "by each site on its own update",
            "distributed": "by all sites in shares, on the sum of what they send",
        }
        where = adds.get(str(found.get("trust")), "by the server on the sum of the updates")
        text = f"of deviation {noise:.4g} per number (whitened where a factor has a public peer), {where}, at every release"
        if found.get("unit") in ("record", "patient") and found.get("trust") != "distributed":
            text = f"in every training step, of deviation {multiplier * clip:.4g} on the sum of the batch's clipped gradients"
        facts.append(("noise", text if multiplier else "none: the multiplier is 0, so nothing is protected"))
    epsilons = found.get("epsilon")
    for delta, value in epsilons.items() if isinstance(epsilons, dict) else ():
        known = finite(value)
        facts.append((f"epsilon at delta {shown(delta, 20)}", "no bound" if known is None else f"{known:.4g}"))
    return [shown(found.get("claim", "privacy.json has no claim."), 600)], facts
