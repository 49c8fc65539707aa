"""Decides by the versions of server and site whether the site is refused, or takes part with or without a warning.

    package                             difference            result
    protocol (messages.PROTOCOL)        the number            refused
    consilium, nvflare                  0.2 and 0.3           refused
    torch, transformers                 2.x and 3.x           refused
    nvflare                             2.9.0 and 2.9.1       warning
    torch, transformers, peft, monai,   2.13 and 2.14         warning
    opacus
    all                                 later numbers         passes

So patch releases may be mixed. The warning says that numbers of sites with different libraries may differ in the last bits.
"""

import re
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

from consilium import __version__
from consilium.core.errors import RefusedError, raise_first
from consilium.core.messages import LIBRARIES, PROTOCOL, Hello
from consilium.core.registry import installed_version

OWN = "consilium"
_VERSION = re.compile(r"[0-9A-Za-z.+-]{1,40}")


RULES = {
    OWN: (2, 2), "nvflare": (2, 3), "torch": (1, 2), "transformers": (1, 2), "peft": (0, 2), "monai": (0, 2), "opacus": (0, 2),
}  # fmt: skip
"""How many leading numbers of two versions must be equal, or the site is refused (0: never); and how many, or it is warned."""


class Verdict(IntEnum):
    """The result for a difference between two versions."""

    PASS = 0
    WARN = 1
    REFUSE = 2


def judge(package: str, version: str, wanted: str) -> Verdict:
    """Return whether a site's version of a package passes. `wanted`: the server's version, or the pinned one."""
    (refuse, warn), one, other = RULES[package], _numbers(version), _numbers(wanted)
    if one[:refuse] != other[:refuse]:
        return Verdict.REFUSE
    return Verdict.WARN if one[:warn] != other[:warn] else Verdict.PASS


def _numbers(text: str) -> list[int]:
    """Return the leading numbers of a version, such as [2, 13, 0] for 2.13.0+cpu; at least three numbers."""
    found = re.match(r"\d+(\.\d+)*", text)
    numbers = [int(part) for part in found[0].split(".")[:4]] if found else [-1]
    return numbers + [0] * (3 - len(numbers))


def libraries() -> dict[str, str]:
    """Return the installed versions of LIBRARIES; those that are not installed are left out."""
    return {name: found for name in LIBRARIES if (found := installed_version(name))}


def differences(reported: Mapping[str, str], own: Mapping[str, str]) -> dict[str, Verdict]:
    """Return the verdict for each package in both `reported` and `own` whose versions do not pass."""
    found = {name: judge(name, reported[name], own[name]) for name in sorted(reported.keys() & own.keys() & RULES.keys())}
    return {name: verdict for name, verdict in found.items() if verdict}


def check_versions(hello: Hello) -> None:
    """Raise RefusedError unless a site with these versions may take part. Types are checked too: the site sends all fields."""
    name, told = hello.name, hello.version if is_version(hello.version) else "of no known version"
    if type(hello.protocol) is not int or hello.protocol != PROTOCOL:
        speaks = hello.protocol if type(hello.protocol) is int and 0 <= hello.protocol < 10**6 else "none that is known"
        raise RefusedError(
            f"{name}: speaks protocol {speaks} (consilium {told}), the server {PROTOCOL} ({__version__}); install the same"
        )
    problems = {
        f"consilium {told}, the server has {__version__}; install the same": (
            not is_version(hello.version) or judge(OWN, hello.version, __version__) is Verdict.REFUSE
        ),
        f"libraries is not a map from {', '.join(LIBRARIES)} to versions; see that site": not are_libraries(hello.libraries),
    }
    raise_first(problems, RefusedError, name)
    own = libraries()
    for package, verdict in differences(hello.libraries, own).items():
        if verdict is Verdict.REFUSE:
            raise RefusedError(
                f"{name}: {package} {hello.libraries[package]}, the server has {own[package]}; "
                "install what consilium pins at both"
            )


def warnings(hello: Hello) -> list[str]:
    """Return a warning for each library of an accepted site whose version differs by more than a patch release."""
    own, bits = libraries(), "its numbers may differ in the last bits"
    differing = differences(hello.libraries, own)
    return [f"{hello.name}: {one} {hello.libraries[one]}, the server has {own[one]}; {bits}" for one in differing]


def is_version(reported: Any) -> bool:
    """Return whether a value sent by a site may be a version."""
    return type(reported) is str and _VERSION.fullmatch(reported) is not None


def are_libraries(reported: Any) -> bool:
    """Return whether a value sent by a site is a map from some of LIBRARIES to versions."""
    return type(reported) is dict and all(
        type(name) is str and name in LIBRARIES and is_version(v) for name, v in reported.items()
    )
