"""A site that lies when it joins: about who it is, what it has, what it runs."""

from pathlib import Path
from typing import Any

import pytest

from consilium import __version__
from consilium.core.errors import RefusedError
from consilium.core.messages import PROTOCOL, Hello
from consilium.server.coordinator import Coordinator
from tests.conftest import assembled, small_config

LIES: list[tuple[str, Any, str]] = [
    ("num_samples", 10**9 + 1, "num_samples is not a whole number"),
    ("num_samples", 2.5, "num_samples is not a whole number"),
    ("num_samples", float("nan"), "num_samples is not a whole number"),
    ("num_samples", True, "num_samples is not a whole number"),
    ("num_samples", "24", "num_samples is not a whole number"),
    ("num_samples", -24, "no training samples"),
    ("test_only", True, "says that it has training samples too"),
    ("test_only", "yes", "test_only is not a boolean"),
    ("joined", "yes", "is malformed"),
    ("joined", 1, "is malformed"),
    ("seeded", 1, "is malformed"),
    ("ledger", "0" * 63, "is malformed"),
    ("version", "0.0.0", r"consilium 0\.0\.0, the server has"),
    ("version", "\x1b[31m" * 10**6, "of no known version"),
    ("version", None, "of no known version"),
    ("version", [__version__], "of no known version"),
    ("protocol", 1, r"speaks protocol 1 \(consilium"),
    ("protocol", float(PROTOCOL), "none that is known"),
    ("protocol", "\x1b[31m" * 10**6, "none that is known"),
    ("protocol", 10**4000, "none that is known"),
    ("libraries", {"torch": "\x1b[31m"}, "libraries is not a map"),
    ("libraries", {"patients": "3"}, "libraries is not a map"),
    ("libraries", [("torch", "2.13.0")], "libraries is not a map"),
    ("libraries", {"torch": "999.0"}, r"torch 999\.0, the server has"),
    ("checkpoint", "0" * 63, "is malformed"),
    ("checkpoint", "../" + "0" * 61, "is malformed"),
    ("checkpoint", None, "is malformed"),
    ("capacity", {"patients": 3.0}, "capacity has other keys"),
    ("capacity", [("time", 1.0)], "capacity has other keys"),
    ("capacity", {"time": 0.0009}, "not a number of at least"),
    ("capacity", {"time": float("inf")}, "not a number of at least"),
    ("capacity", {"memory": "4"}, "not a number of at least"),
    ("name", "server", "cannot be a site's name"),
    ("name", "", "cannot be a site's name"),
    ("name", "../../etc", "cannot be a site's name"),
    ("name", "a/b", "cannot be a site's name"),
    ("name", "a\x1b[2Jb", "cannot be a site's name"),
    ("name", "a\nb", "cannot be a site's name"),
    ("name", "a" * 129, "cannot be a site's name"),
    ("name", "ü" * 65, "cannot be a site's name"),  # 130 bytes
    ("name", 7, "cannot be a site's name"),
]


@pytest.mark.parametrize(("field", "value", "reason"), LIES, ids=[f"{f}-{i}" for i, (f, _, _) in enumerate(LIES)])
def test_a_lie_is_refused_in_a_short_visible_line(field: str, value: Any, reason: str, tmp_path: Path) -> None:
    server = Coordinator(assembled(small_config("fedit")), tmp_path, lambda event: None)
    honest = {"name": "site-1", "num_samples": 24, "joined": False, "version": __version__}
    with pytest.raises(RefusedError, match=reason) as refusal:
        server.welcome(Hello(**(honest | {field: value})))
    assert str(refusal.value).isprintable()
    assert len(str(refusal.value)) < 500
    assert server.sites == {}
    server.welcome(Hello(**honest, checkpoint="", capacity={}))
    assert server.sites.keys() == {"site-1"}


@pytest.mark.parametrize("name", ["site-1", "Klinikum Süd", "hospital.example.org", "_ward", "a@b", "ü" * 64])
def test_names_of_honest_sites_are_taken(name: str, tmp_path: Path) -> None:
    server = Coordinator(assembled(small_config("fedit")), tmp_path, lambda event: None)
    server.welcome(Hello(name, 10**9, False, __version__, "", {"time": 2, "memory": 0.001}))
    assert server.sites.keys() == {name}
