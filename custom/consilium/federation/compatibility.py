"""Which differences in version between server and site stop a site, are worth a warning, or pass.

    what                                differs in            then
    protocol (messages.PROTOCOL)        the number            refused
    consilium, nvflare                  0.2 and 0.3           refused
    torch, transformers                 2.x and 3.x           refused
    nvflare                             2.9.0 and 2.9.1       warned of
    torch, transformers, peft, monai,   2.13 and 2.14         warned of
    opacus
    all                                 what comes later      passes

So patch releases may be mixed. Numbers of sites with different libraries are not equal to the last bit, which is the warning.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from consilium import __version__
from consilium.core.errors import RefusedError
from consilium.core.messages import LIBRARIES, PROTOCOL, Hello

OWN = "consilium"
_VERSION = re.compile(r"[0-9A-Za-z.+-]{1,40}")


@dataclass(frozen=True)
class Rule:
    """How many leading numbers of a version must be equal: else refused (0: never refused), else warned of."""

    refuse: int
    warn: int


RULES = {
    OWN: Rule(2, 2), "nvflare": Rule(2, 3), "torch": Rule(1, 2), "transformers": Rule(1, 2),
    "peft": Rule(0, 2), "monai": Rule(0, 2), "opacus": Rule(0, 2),
}  # fmt: skip


class Verdict(IntEnum):
    """What a difference leads to."""

    PASS = 0
    WARN = 1
    REFUSE = 2


def judge(package: str, told: str, wanted: str) -> Verdict:
    """Return what a site's version of a package leads to, beside the server's or the pinned one."""
    rule, one, other = RULES[package], _numbers(told), _numbers(wanted)
    if one[: rule.refuse] != other[: rule.refuse]:
        return Verdict.REFUSE
    return Verdict.WARN if one[: rule.warn] != other[: rule.warn] else Verdict.PASS


def _numbers(text: str) -> list[int]:
    """Return the leading numbers of a version, of 2.13.0+cpu 2, 13 and 0; at least three."""
    found = re.match(r"\d+(\.\d+)*", text)
    numbers = [int(part) for part in found[0].split(".")[:4]] if found else [-1]
    return numbers + [0] * (3 - len(numbers))


def libraries() -> dict[str, str]:
    """Return the installed versions of LIBRARIES; those that are not installed are left out."""
    return dict(_installed())


@cache
def _installed() -> dict[str, str]:
    """Look once a process: each time takes 20 ms, and a simulation's sites are hundreds."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # carried in a job's app/custom
            continue
    return found


def differences(told: Mapping[str, str], own: Mapping[str, str]) -> dict[str, Verdict]:
    """Return, by package that both have, what its difference leads to, but for those that pass."""
    found = {name: judge(name, told[name], own[name]) for name in sorted(told.keys() & own.keys() & RULES.keys())}
    return {name: verdict for name, verdict in found.items() if verdict}


def check_versions(hello: Hello) -> None:
    """Raise RefusedError unless a site's versions may take part. Kinds are checked first: all of it comes from the site."""
    name, told = hello.name, hello.version if is_version(hello.version) else "of no known version"
    if type(hello.protocol) is not int or hello.protocol != PROTOCOL:
        speaks = hello.protocol if type(hello.protocol) is int and 0 <= hello.protocol < 10**6 else "none that is known"
        raise RefusedError(
            f"{name}: speaks protocol {speaks} (consilium {told}), the server {PROTOCOL} ({__version__}); install the same"
        )
    if not is_version(hello.version) or judge(OWN, hello.version, __version__) is Verdict.REFUSE:
        raise RefusedError(f"{name}: consilium {told}, the server has {__version__}; install the same")
    if not are_libraries(hello.libraries):
        raise RefusedError(f"{name}: libraries is not a map from {', '.join(LIBRARIES)} to versions; see that site")
    own = libraries()
    for package, verdict in differences(hello.libraries, own).items():
        if verdict is Verdict.REFUSE:
            said = f"{package} {hello.libraries[package]}, the server has {own[package]}"
            raise RefusedError(f"{name}: {said}; install what consilium pins at both")


def warnings(hello: Hello) -> list[str]:
    """Return a line for each library of an admitted site that differs enough to be told of."""
    own = libraries()
    differing = differences(hello.libraries, own)
    found = [f"{package} {hello.libraries[package]}, the server has {own[package]}" for package in differing]
    return [f"{hello.name}: {one}; its numbers may differ in the last bits" for one in found]


def is_version(told: Any) -> bool:
    """Tell whether what a site says may be a version."""
    return type(told) is str and _VERSION.fullmatch(told) is not None


def are_libraries(told: Any) -> bool:
    """Tell whether what a site says is a map from some of LIBRARIES to versions."""
    return type(told) is dict and all(type(name) is str and name in LIBRARIES and is_version(v) for name, v in told.items())
