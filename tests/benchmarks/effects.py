"""The effects that RESULTS.md reports: differences between cells of a study, named in its first lines before it ran.

`results` makes the tables.
"""

from dataclasses import dataclass
from typing import Literal

Labels = dict[str, str]
Side = Literal["above 0", "below 0", "0"]
DICE, ACCURACY, LOSS = "test/global/dice", "test/global/accuracy", "test/global/loss"
BRIGHTFIELD = f"{DICE} at brightfield"


@dataclass(frozen=True)
class Best:
    """The cell with the highest mean over the seeds. The choice uses the measured values, as the study's rule says."""

    of: tuple[Labels, ...]


Term = Labels | Best


@dataclass(frozen=True)
class Effect:
    """The sum of the `plus` cells minus the sum of the `minus` cells and minus `level`, per seed.

    `expect` says where the interval should lie. "0": it should contain 0, as in a control. Effects with the same `about` and
    different `column` share a row of the page's table.
    """

    about: str
    measure: str
    plus: tuple[Term, ...]
    minus: tuple[Term, ...] = ()
    expect: Side = "above 0"
    level: float = 0.0
    column: str = ""

    @property
    def name(self) -> str:
        """The description with the column, which no other effect of the study has."""
        return f"{self.about}, {self.column}" if self.column else self.about

    @property
    def cells(self) -> list[Labels]:
        """The labels of all cells in the effect."""
        return [one for term in (*self.plus, *self.minus) for one in (term.of if isinstance(term, Best) else (term,))]


def _pair(
    about: str, measure: str, axis: str, one: str, other: str, both: Labels, expect: Side = "above 0", column: str = ""
) -> Effect:
    return Effect(about, measure, ({axis: one} | both,), ({axis: other} | both,), expect, column=column)


def _grows(about: str, measure: str, pair: tuple[Term, Term], before: tuple[Term, Term], column: str) -> Effect:
    """Return the effect: the difference within `pair` minus the difference within `before`."""
    return Effect(about, measure, (pair[0], before[1]), (pair[1], before[0]), column=column)


def _iat() -> list[Effect]:
    found = []
    for shift in ("both", "appearance", "annotation", "none"):
        side: Side = "0" if shift == "none" else "above 0"
        for other in ("M1", "M2", "M3"):
            about = f"M4's lead, shift: {shift}"
            found.append(_pair(about, DICE, "split", "M4", other, {"shift": shift}, side, f"over {other}"))
    for shift in ("appearance", "annotation"):
        for other in ("M1", "M2", "M3"):
            there, without = ([{"split": one, "shift": where} for one in ("M4", other)] for where in (shift, "none"))
            about = f"growing with {shift}: M4's lead with the shift minus its lead without"
            found.append(_grows(about, DICE, (there[0], there[1]), (without[0], without[1]), f"over {other}"))
    return found


def _sor() -> list[Effect]:
    differ, alike = {"sites": "differ"}, {"sites": "alike"}
    share = "leaked share/of both"
    found = [_pair(f"sites differ: lambda {w} minus off, leaked share", share, "sor", w, "0", differ, "below 0")
             for w in ("0.0001", "0.01")]  # fmt: skip
    found += [_pair(f"sites differ: lambda {w} minus off, Dice", DICE, "sor", w, "0", differ) for w in ("0.0001", "0.01")]
    found += [_pair(f"sites alike: lambda {w} minus off, Dice", DICE, "sor", w, "0", alike, "0") for w in ("0.0001", "0.01")]
    return [
        *found,
        _pair("premise, SOR off: leaked share, sites differ minus alike", share, "sites", "differ", "alike", {"sor": "0"}),
    ]


def _deer() -> list[Effect]:
    relative, fedit = "deviation/relative", {"method": "FedIT"}
    pairs = [("rank 32", "rank 2"), ("16 steps", "1 step"), ("unlike", "alike")]
    grows = [_pair(f"FedIT's deviation: {one} minus {other}", relative, "case", one, other, fedit) for one, other in pairs]
    costs = [_pair(f"sites {case}: DEeR minus FedIT, accuracy", ACCURACY, "method", "DEeR", "FedIT", {"case": case}, side)
             for case, side in (("unlike", "above 0"), ("alike", "0"))]  # fmt: skip
    return [*grows, *costs]


def _fedsca() -> list[Effect]:
    sides: dict[str, Side] = {"2": "above 0", "1": "0"}
    found = []
    for groups, side in sides.items():
        for one in ("FedSCA", "SGCA", "LAT"):
            column = f"{groups} group{'s' if groups == '2' else ''}"
            found.append(_pair(f"Dice, {one} minus mean", DICE, "method", one, "mean", {"groups": groups}, side, column))
    finds = Effect("share of FedSCA's weight for other sites in the site's own group, minus 1/3", "own group",
                   ({"groups": "2", "method": "FedSCA"},), level=1 / 3, column="2 groups")  # fmt: skip
    return [*found, finds]


def _fedhera() -> list[Effect]:
    found = []
    for case in ("unequal", "stale"):
        for other in ("no tail", "lowest rank"):
            about = f"loss, FedHera minus {other}"
            found.append(_pair(about, LOSS, "method", "FedHera", other, {"case": case}, "below 0", f"machines {case}"))
    to_win = "loss to win back: FedHera minus FedHera whose sites all train all ranks"
    found.append(_pair(to_win, LOSS, "case", "unequal", "everything", {"method": "FedHera"}, column="machines unequal"))
    spectrum = Effect("premise: share of W_g's energy in its first 2 ranks, minus 1/2", "first 2 ranks",
                      ({"method": "FedHera", "case": "unequal"},), (), "below 0", 0.5, "machines unequal")  # fmt: skip
    return [*found, spectrum]


PEERS = ("FedHomoLoRA", "HetLoRA", "FLoRA", "FlexLoRA", "FedHL", "FedHeLLo")
"""The other methods for unequal machines that FedHera is compared with."""


def _real_text() -> list[Effect]:
    return [
        _pair(f"loss, {other} minus FedHera", LOSS, "method", other, "FedHera", {"data": data}, column=data)
        for data in ("e2e", "medquad", "gsm8k")
        for other in ("local only", *PEERS)
    ]


def _language() -> list[Effect]:
    method, fedit, unequal = "method", "FedIT", ("FLoRA", "FlexLoRA", "HetLoRA")
    return [
        _pair("FedIT minus local only", LOSS, method, fedit, "local only", {}, "below 0"),
        *(_pair(f"FedHera minus {other}", LOSS, method, "FedHera", other, {}, "below 0") for other in unequal),
        _pair("pooled minus FedIT", LOSS, method, "pooled", fedit, {}, "below 0"),
        _pair("DP-SGD by the step minus FedIT", LOSS, method, "DP-SGD by the step", fedit, {}),
    ]


def _unequal() -> list[Effect]:
    found = [
        _pair(f"{other} minus FedHera", measure, "method", other, "FedHera", {"rate": rate}, column=f"{name}, rate {rate}")
        for name, measure in (("loss", LOSS), ("drift", "oracle drift/relative"))
        for rate in ("0.005", "0.02")
        for other in (*PEERS, "FedHeLLo of rank 2")
    ]
    choices = ("gate neutral", "gate open", "residual score", "even allocation", "random allocation")
    return found + [
        _pair(f"{one} minus FedHera", LOSS, "method", one, "FedHera", {"rate": "0.02"}, column="loss, rate 0.02")
        for one in choices
    ]


def _deer_cells() -> list[Effect]:
    without, found = "DEeR without regulator", []
    for privacy in ("without", "printed 6", "printed 1", "honest 6"):
        sides: dict[str, Side] = {"LoRA": "above 0", without: "0" if privacy == "without" else "above 0"}
        for other, side in sides.items():
            about = f"DEeR minus {other}"
            found.append(_pair(about, ACCURACY, "method", "DEeR", other, {"privacy": privacy}, side, privacy))
    return found


def _noise() -> list[Effect]:
    sides: dict[str, Side] = {"8": "above 0", "1000": "0"}
    return [
        _pair(f"epsilon {epsilon}: regulator on minus off, Dice", DICE, "regulator", "on", "off", {"epsilon": epsilon}, side)
        for epsilon, side in sides.items()
    ]


def _cells() -> list[Effect]:
    best = "FedIT + prior + kept state"
    return [Effect(f"{best} minus {other}, accuracy", ACCURACY, ({"method": best},), ({"method": other},))
            for other in ("local only", "FedIT")]  # fmt: skip


def _federate() -> list[Effect]:
    prior, best = "FedIT + prior", "FedIT + prior + kept state"
    added = (prior, "SCAFFOLD", "FedIT + weights", "FedIT + kept state", "FedIT + server momentum", "FedIT + server Adam")
    to_best = ("FedIT + prior + kept + momentum 0.7", "SCAFFOLD + prior + kept state")
    pairs = [(one, "local only") for one in ("FedIT", prior)] + [(one, "FedIT") for one in added]
    pairs += [(best, prior), *((one, best) for one in to_best)]
    gaps = [(best, "pooled of 60 steps"), (best, "pooled of 720 steps"), (f"{best} at 0.006", "pooled of 720 steps at 0.006")]
    later = (f"{best} at 0.01", "FFA-LoRA + prior + kept state at 0.02")
    pooled = ("pooled of 720 steps", "pooled of 720 steps at 0.006", "pooled of 60 steps of batch 192 at 0.01")
    gaps += [(one, other) for one in later for other in pooled]
    return [_pair(f"{one} minus {other}", ACCURACY, "method", one, other, {}) for one, other in pairs] + [
        _pair(f"{one} minus {other}", ACCURACY, "method", one, other, {}, "0") for one, other in gaps
    ]


def _methods() -> list[Effect]:
    iat, low = "M4 (IAT)", "FedSCA with 4 low"
    over = {
        iat: ("M1 (FedSA-LoRA)", "M2", "M3"),
        "FedSCA with 1 low": ("LAT with 1 low", "SGCA"),
        low: ("LAT with 4 low", "SGCA"),
    }
    pairs = [(one, other) for one, others in over.items() for other in others]
    pairs += [(f"{one[:2]} + SOR", one) for one in ("M1 (FedSA-LoRA)", "M2", "M3", iat)]
    pairs += [(one, "FedFMS") for one in ("SGCA", "LAT with 1 low", "LAT with 4 low")]
    alone = ("FedIT", "FFA-LoRA", "M1 (FedSA-LoRA)", iat, "M4 + SOR", "pooled")
    pairs += [(one, "local only") for one in alone]
    pairs += [(one, "bottleneck local only") for one in ("FedFMS", "FedProx", "LAT with 4 low", "SGCA", low)]
    return [_pair(f"{one} minus {other}", DICE, "method", one, other, {}) for one, other in pairs]


def _curve() -> list[Effect]:
    federated, pooled = ("FedIT", "FedSA", "FedIT + prior + kept state"), "pooled of 240 steps"

    def pairs(images: str) -> dict[str, tuple[Term, Term]]:
        at: dict[str, Labels] = {one: {"method": one, "images": images} for one in (*federated, pooled, "local only")}
        found: dict[str, tuple[Term, Term]] = {f"{one} minus local only": (at[one], at["local only"]) for one in federated}
        return found | {f"best federated method minus {pooled}": (Best(tuple(at[one] for one in federated)), at[pooled])}

    several = {images: pairs(images) for images in ("3", "10", "30", "all")}
    found = [
        Effect(f"{images} images per site", ACCURACY, (one,), (other,), column=about)
        for images, here in several.items()
        for about, (one, other) in here.items()
    ]
    return found + [
        _grows("growth: all images minus 3 images", ACCURACY, one, several["3"][about], about)
        for about, one in several["all"].items()
    ]


def _nuclei() -> list[Effect]:
    methods = ("FedIT", "FedSA", "IAT", "FedSA + kept state", "pooled of 80 steps", "pooled of 400 steps")
    return [
        _pair(
            f"{one} minus local only", DICE, "method", one, "local only", {"images": images}, column=f"{images} images per site"
        )
        for images in ("3", "10", "all")
        for one in methods
    ]


def _converged() -> list[Effect]:
    return [
        _pair(f"{one} minus local only", DICE, "method", one, "local only", {}) for one in ("FedIT", "FedSA", "IAT", "pooled")
    ]


def _new_site() -> list[Effect]:
    alone = {"brightfield": "alone", "method": "local only"}
    joins = [
        Effect(
            f"brightfield joins: {one} minus training alone",
            BRIGHTFIELD,
            ({"brightfield": "joins", "method": one},),
            (alone,),
        )
        for one in ("FedSA", "IAT", "FedIT")
    ]
    return joins + [
        _pair(f"brightfield only scored: {one} minus FedSA (there the pretrained model)", BRIGHTFIELD, "method", one, "FedSA",
              {"brightfield": "unseen"})
        for one in ("IAT", "FedIT")
    ]  # fmt: skip


def _utility() -> list[Effect]:
    step, mixed = {"method": "DP-SGD by the step"}, {"mix": "0.1"}
    at = {epsilon: step | mixed | {"epsilon": epsilon} for epsilon in ("8", "3", "1")}
    found = [Effect("DP-SGD by the step minus 0.36", ACCURACY, (at["8"],), level=0.36, column="epsilon 8")]
    for other in ("FedIT", "FedIT by SGD"):
        minus = {"method": other, "epsilon": "none"} | mixed
        about = f"DP-SGD by the step minus {other} without privacy"
        found.append(Effect(about, ACCURACY, (at["8"],), (minus,), column="epsilon 8"))
    alone, pooled = {"method": "DP-SGD at each site"}, {"method": "DP-SGD pooled", "mix": "one site"}
    sides: list[tuple[Labels, Side]] = [(alone, "above 0"), (pooled, "0")]
    found += [
        Effect(
            f"DP-SGD by the step minus {other['method']}", ACCURACY, (one,), (one | other,), side, column=f"epsilon {epsilon}"
        )
        for other, side in sides
        for epsilon, one in at.items()
    ]
    more: list[tuple[str, Side]] = [("site level by shares", "above 0"), ("DP-SGD by the step", "0")]
    return found + [
        _pair(f"{method} at 50 sites minus at 12", ACCURACY, "mix", "0.1 of 50 sites", "0.1",
              {"method": method, "epsilon": "8"}, side, "epsilon 8")
        for method, side in more
    ]  # fmt: skip


def _private(measure: str, better: Side, without: str, epsilons: tuple[str, ...] = ("8",)) -> list[Effect]:
    """Return the effects of a smaller study of private training. `without` is a method without privacy."""
    step = "DP-SGD by the step"
    sides: dict[str, Side] = {"DP-SGD at each site": better, "DP-SGD pooled": "0"}
    found = [
        _pair(f"{step} minus {one}", measure, "method", step, one, {"epsilon": epsilon}, side, f"epsilon {epsilon}")
        for one, side in sides.items()
        for epsilon in epsilons
    ]
    plus, minus = {"method": step, "epsilon": "8"}, {"method": without, "epsilon": "none"}
    about = f"{step} minus {without} without privacy"
    return [*found, Effect(about, measure, (plus,), (minus,), better, column="epsilon 8")]


EFFECTS = {
    "claim_iat": _iat(),
    "claim_sor": _sor(),
    "claim_deer": _deer(),
    "claim_deer_noise": _noise(),
    "claim_fedsca": _fedsca(),
    "deer_rbc12": _deer_cells(),
    "claim_fedhera": _fedhera(),
    "real_text": _real_text(),
    "unequal_e2e": _unequal(),
    "quickstart_cells": _cells(),
    "why_federate_rbc12": _federate(),
    "methods_medquad": _language(),
    "methods_nuclei": _methods(),
    "learning_curve_cells": _curve(),
    "learning_curve_nuclei": _nuclei(),
    "converged_nuclei": _converged(),
    "new_site_nuclei": _new_site(),
    "privacy_utility_rbc12": _utility(),
    "privacy_smears_rbc12": _private(ACCURACY, "above 0", "FedIT by SGD", ("8", "3", "1")),
    "privacy_medquad": _private(LOSS, "below 0", "FedIT", ("8", "3", "1")),
    "privacy_nuclei": _private(DICE, "above 0", "FedIT"),
}
