"""The papers' claims, each with the effects that decide it. RESULTS.md begins with their table."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Claim:
    """A claim, the study that tests it, and the effects that decide it, `by` short name. `found` adds words to the verdict."""

    text: str
    study: str
    by: Mapping[str, str]
    found: str = ""


def _leads(about: str) -> dict[str, str]:
    """Return the effects of M4's lead, by the split that it leads."""
    return {split: f"{about}, over {split}" for split in ("M1", "M2", "M3")}


CLAIMS = [
    Claim(
        "IAT: with both shifts M4 beats M1, M2 and M3",
        "claim_iat",
        _leads("M4's lead, shift: both"),
        "against M2 and M3, not against M1 (FedSA-LoRA)",
    ),
    Claim(
        "IAT: M4's lead grows with the appearance shift",
        "claim_iat",
        _leads("growing with appearance: M4's lead with the shift minus its lead without"),
    ),
    Claim(
        "IAT: M4's lead grows with the annotation shift",
        "claim_iat",
        _leads("growing with annotation: M4's lead with the shift minus its lead without"),
        "against M2 and M3, not against M1",
    ),
    Claim(
        "SOR: it lowers leakage and raises the score",
        "claim_sor",
        {"share": "sites differ: lambda 0.0001 minus off, leaked share", "Dice": "sites differ: lambda 0.0001 minus off, Dice"},
        "although there is leakage to remove",
    ),
    Claim(
        "DEeR: the average of LoRA factors deviates from the average of their products",
        "claim_deer",
        {
            "rank": "FedIT's deviation: rank 32 minus rank 2",
            "steps": "FedIT's deviation: 16 steps minus 1 step",
            "sites": "FedIT's deviation: unlike minus alike",
        },
        "more with a higher rank, with more steps and with unlike sites",
    ),
    Claim(
        "DEeR: avoiding this deviation raises the score",
        "claim_deer",
        {"accuracy": "sites unlike: DEeR minus FedIT, accuracy"},
    ),
    Claim(
        "DEeR: its regulator raises the score at equal epsilon",
        "claim_deer_noise",
        {"Dice": "epsilon 8: regulator on minus off, Dice"},
        "narrowly; 15 of the 20 seeds were added later, and these 15 alone do not show it",
    ),
    Claim(
        "FedSCA: its mixture finds the groups of similar sites",
        "claim_fedsca",
        {"share": "share of FedSCA's weight for other sites in the site's own group, minus 1/3, 2 groups"},
    ),
    Claim(
        "FedSCA: beats the mean if sites form two groups",
        "claim_fedsca",
        {
            name: f"Dice, {method} minus mean, 2 groups"
            for name, method in (("whole", "FedSCA"), ("SGCA", "SGCA"), ("LAT", "LAT"))
        },
        "only its mixture (SGCA) by itself; with similar sites the mean is better",
    ),
    Claim(
        "FedHera: downloading more ranks than a site trains lowers the loss",
        "claim_fedhera",
        {"unequal": "loss, FedHera minus no tail, machines unequal", "stale": "loss, FedHera minus no tail, machines stale"},
        "with unequal machines; with stale sites not shown; the paper's reason does not apply",
    ),
]
