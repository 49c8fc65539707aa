"""The papers' claims, each with the effects that decide it: the table that RESULTS.md begins with."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Claim:
    """A claim and what came out, `found`, in words behind the verdict; `by`: effects of a study, a short name for each."""

    text: str
    study: str
    by: Mapping[str, str]
    found: str = ""


def _each(pattern: str, *names: str) -> dict[str, str]:
    """Return effects that differ in one name, by it."""
    return {name: pattern.format(name) for name in names}


CLAIMS = [
    Claim(
        "IAT: with both shifts M4 beats the other splits",
        "claim_iat",
        {"M1": "shift both: M4 minus M1 (FedSA)", **_each("shift both: M4 minus {}", "M2", "M3")},
        "not against M1, which is FedSA-LoRA",
    ),
    Claim(
        "IAT: the lead grows with the shift in looks",
        "claim_iat",
        _each("growing with appearance: M4 minus {} there, minus the same without shifts", "M1", "M2", "M3"),
    ),
    Claim(
        "IAT: the lead grows with the shift in annotation",
        "claim_iat",
        _each("growing with annotation: M4 minus {} there, minus the same without shifts", "M1", "M2", "M3"),
        "not against M1",
    ),
    Claim(
        "SOR: less leaks, and the score is better",
        "claim_sor",
        {"share": "sites differ: lambda 0.0001 minus off, leaked share", "Dice": "sites differ: lambda 0.0001 minus off, Dice"},
        "though its premise is there",
    ),
    Claim(
        "DEeR: averaged factors deviate from averaged products",
        "claim_deer",
        {
            "rank": "FedIT's deviation: rank 32 minus rank 2",
            "steps": "FedIT's deviation: 16 steps minus 1 step",
            "sites": "FedIT's deviation: unlike minus alike",
        },
        "more with rank, with steps and with unlike sites",
    ),
    Claim(
        "DEeR: without deviation the score is better",
        "claim_deer",
        {"accuracy": "sites unlike: DEeR minus FedIT, accuracy"},
    ),
    Claim(
        "DEeR: its regulator is better at equal epsilon",
        "claim_deer_noise",
        {"Dice": "epsilon 8: regulator on minus off, Dice"},
        "by little; the fifteen seeds that were added do not show it alone",
    ),
    Claim(
        "FedSCA: its mixture finds groups of alike sites",
        "claim_fedsca",
        {"share": "FedSCA's own group's share of the weight for others, minus 1/3"},
    ),
    Claim(
        "FedSCA: beats the mean where sites form two groups",
        "claim_fedsca",
        {"whole": "2 groups: FedSCA minus mean", **_each("2 groups: {} minus mean", "SGCA", "LAT")},
        "its mixture (SGCA) by itself; where all sites are alike the mean is better",
    ),
    Claim(
        "FedHera: downloading more than a site trains pays",
        "claim_fedhera",
        {"unequal": "machines unequal: FedHera minus no tail, loss", "stale": "machines stale: FedHera minus no tail, loss"},
        "with unequal machines, and not for the paper's reason: the spectrum is short",
    ),
]
