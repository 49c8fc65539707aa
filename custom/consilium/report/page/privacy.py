"""The privacy statement of a page: what is promised to whom, and the noise that it took."""

import math
from collections.abc import Mapping
from typing import Any

from consilium.config.privacy import PrivacyConfig
from consilium.privacy.plan import not_private
from consilium.report.clean import shown
from consilium.report.page.files import number
from consilium.report.page.record import Record

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


def statement(record: Record) -> tuple[list[str], list[tuple[str, str]]]:
    """Return a run's privacy as sentences, and as pairs of texts."""
    if record.config.privacy is None:
        return [NONE], []
    sentences, facts = _promised(record, record.config.privacy)
    if (seeded := record.seeded) and not record.privacy:  # privacy.json says it itself
        sentences = [shown(not_private(seeded), 600), *sentences]
    return sentences, facts


def _promised(record: Record, private: PrivacyConfig) -> tuple[list[str], list[tuple[str, str]]]:
    if record.privacy is not None:
        sentences, facts = of_summary(record.privacy)
        return [*sentences, SCORES], facts
    facts = [("unit", private.unit), ("adjacency", private.adjacency), ("trust", private.trust), ("clip", f"{private.clip:g}")]
    spent = [value for line in record.of("concluded") if (value := number(line.get("privacy/epsilon"))) is not None]
    if private.unit != "site" and private.trust == "local":
        return [BY_UNIT.format(unit=private.unit.capitalize()), SCORES], facts
    facts += [("epsilon so far", f"{spent[-1]:.4g} at delta {private.delta:g}")] if spent else []
    return ["The run has not ended: what it promises is known at its end.", SCORES], facts


def of_summary(found: Mapping[str, Any]) -> tuple[list[str], list[tuple[str, str]]]:
    """Return what a privacy.json, or a site's own plan, says: the claim in a sentence, and its numbers."""
    facts = [
        (name, shown(found[name], 80)) for name in ("unit", "adjacency", "trust", "accountant", "calibration") if name in found
    ]
    clip, multiplier, releases = (number(found.get(name)) for name in ("clip", "noise_multiplier", "releases"))
    facts += [("clip (C)", f"{clip:g}")] if clip is not None else []
    facts += [("noise multiplier (sigma)", f"{multiplier:.4g}")] if multiplier is not None else []
    facts += [("releases", f"{releases:.0f}")] if releases is not None else []
    if clip is not None and multiplier is not None and found.get("calibration") != "paper":
        facts.append(("noise", _noise(found, clip, multiplier)))
    epsilons = found.get("epsilon")
    items = epsilons.items() if isinstance(epsilons, dict) else ()
    facts += [(f"epsilon at delta {shown(delta, 20)}", _epsilon(value)) for delta, value in items]
    return [shown(found.get("claim", "privacy.json has no claim."), 600)], facts


def _epsilon(value: Any) -> str:
    known = number(value)
    return "no bound" if known is None or math.isinf(known) else f"{known:.4g}"


def _noise(found: Mapping[str, Any], clip: float, multiplier: float) -> str:
    """Return in words how much noise was added where."""
    if multiplier == 0:
        return "none: the multiplier is 0, so nothing is protected"
    if found.get("unit") in ("record", "patient") and found.get("trust") != "distributed":
        return f"in every training step, of deviation {multiplier * clip:.4g} on the sum of the batch's clipped gradients"
    deviation = multiplier * clip * (2 if found.get("adjacency") == "replace" else 1)
    adds = {"local": "by each site on its own update", "distributed": "by all sites in shares, on the sum of what they send"}
    where = adds.get(str(found.get("trust")), "by the server on the sum of the updates")
    return f"of deviation {deviation:.4g} per number (whitened where a factor has a public peer), {where}, at every release"
