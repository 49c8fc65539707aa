"""Which versions take part together: the table of versions.py, read as an administrator would."""

from dataclasses import replace
from pathlib import Path

import pytest

from consilium import __version__
from consilium.client import machine_check
from consilium.core.errors import RefusedError
from consilium.core.messages import LIBRARIES, PROTOCOL, Hello
from consilium.federation import compatibility
from consilium.federation.compatibility import RULES, Verdict, check_versions, judge, warnings

PAGE = Path(__file__).parents[2] / "provisioning"
HELLO = Hello("site-1", 24, False, __version__)


@pytest.mark.parametrize(
    ("package", "site", "server", "verdict"),
    [
        ("consilium", "0.2.0", "0.2.9", Verdict.PASS),
        ("consilium", "0.2.1.dev3+g1", "0.2.0", Verdict.PASS),
        ("consilium", "0.2.0", "0.3.0", Verdict.REFUSE),
        ("consilium", "1.2.0", "0.2.0", Verdict.REFUSE),
        ("nvflare", "2.9.0", "2.9.1", Verdict.WARN),
        ("nvflare", "2.10.0", "2.9.0", Verdict.REFUSE),
        ("torch", "2.13.0+cpu", "2.13.1+cu130", Verdict.PASS),
        ("torch", "2.12.0", "2.13.0", Verdict.WARN),
        ("torch", "3.0.0", "2.13.0", Verdict.REFUSE),
        ("transformers", "4.57.0", "5.23.0", Verdict.REFUSE),
        ("transformers", "5.22.1", "5.23.0", Verdict.WARN),
        ("peft", "1.0.0", "0.21.2", Verdict.WARN),
        ("opacus", "1.6.0", "1.6", Verdict.PASS),
        ("torch", "nightly", "2.13.0", Verdict.REFUSE),
        ("torch", "2.13rc1", "2.13.0", Verdict.PASS),
    ],
)
def test_a_difference_leads_to_what_the_table_says(package: str, site: str, server: str, verdict: Verdict) -> None:
    assert judge(package, site, server) is verdict
    assert judge(package, server, site) is verdict


def test_every_package_that_a_site_tells_of_has_a_rule() -> None:
    assert RULES.keys() == {"consilium", *LIBRARIES}
    assert all(refuse <= warn for refuse, warn in RULES.values())


@pytest.mark.parametrize(("site", "server"), [("0.7.1", "0.7.4"), ("0.7.4", "0.7.1")])
def test_a_patch_release_at_the_server_or_at_a_site_stops_nobody(
    site: str, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compatibility, "__version__", server)
    check_versions(replace(HELLO, version=site))
    with pytest.raises(RefusedError, match=r"consilium 0\.8\.0, the server has 0\.7"):
        check_versions(replace(HELLO, version="0.8.0"))


def test_the_protocol_is_compared_before_all_else() -> None:
    said = rf"speaks protocol {PROTOCOL + 1} \(consilium 0\.2\.7\), the server {PROTOCOL} \({__version__}\); install the same"
    with pytest.raises(RefusedError, match=said):
        check_versions(replace(HELLO, version="0.2.7", protocol=PROTOCOL + 1))


def test_a_library_that_differs_is_told_of_and_one_that_only_the_site_has_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compatibility, "libraries", lambda: {"torch": "2.13.0", "nvflare": "2.9.0"})
    hello = replace(HELLO, libraries={"torch": "2.12.1", "nvflare": "2.9.0", "opacus": "1.0.0"})
    check_versions(hello)
    assert warnings(hello) == ["site-1: torch 2.12.1, the server has 2.13.0; its numbers may differ in the last bits"]


def test_the_doctor_judges_what_is_installed_as_a_server_would(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {"torch": "2.13.0", "nvflare": "2.9.0", "peft": "0.21.2"}
    monkeypatch.setattr(machine_check, "tested_versions", lambda: wanted)
    installed = {"torch": "2.13.4+cpu", "nvflare": "2.10.0", "peft": "0.20.0"}
    monkeypatch.setattr(machine_check, "installed_version", lambda name: installed.get(name, "1.0"))
    found = {one.check: one for one in machine_check.examine_versions()}
    assert found["torch"].ok
    assert not found["torch"].advice
    assert found["nvflare"].remedy == "pip install nvflare==2.9.0"
    assert found["peft"].ok
    assert found["peft"].advice.endswith("pip install peft==0.21.2")
