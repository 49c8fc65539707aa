"""Certificates that end and credentials that are revoked, on running kits: one hospital after the other, none has to wait."""

import json
import time
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from nvflare.lighter.utils import sign_folders

from consilium.core.errors import ConfigError
from consilium.federation.run_folders import STATE
from consilium.flare.admin.kit_metrics import collect_metrics
from consilium.flare.kit import connection_refusals
from consilium.flare.kit.connection_refusals import Cause
from consilium.flare.kit.doctor import examine
from consilium.flare.kit.heartbeat_server import read_attendance
from consilium.flare.kit.kit_reader import certificate_path
from consilium.flare.kit.renewal import renew, update_kit
from consilium.flare.kit.revocation import revoke
from consilium.flare.kit.revocation_check import READMITTED
from tests.conftest import small_config
from tests.deployment.federation import ADMIN, Federation
from tests.deployment.jobs import consilium
from tests.deployment.network import Relay


def age(kit: Path, state: Path, days: float, root: bool = True) -> None:
    """Let a kit's certificates be as they are after so many days more, signed by the project's root as they were.

    `root`: whether the root's certificate in the kit ages too.
    """
    key = load_pem_private_key(json.loads(state.read_text())["root_pri_key"].encode(), None)
    for path in (certificate_path(kit), kit / "startup/rootCA.pem")[: 1 + root]:
        old = x509.load_pem_x509_certificate(path.read_bytes())
        new = x509.CertificateBuilder(old.issuer, old.subject, old.public_key(), old.serial_number)
        new = new.not_valid_before(old.not_valid_before_utc - timedelta(days)).not_valid_after(
            old.not_valid_after_utc - timedelta(days)
        )
        for extension in old.extensions:
            new = new.add_extension(extension.value, extension.critical)
        path.write_bytes(new.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM))
    sign_folders(str(kit / "startup"), key, signature_file="signature.json")


@pytest.mark.long
def test_renewed_kit_joins_beside_old_ones(tmp_path: Path) -> None:
    with Federation(tmp_path, {"site-1": {}, "site-2": {}}) as federation:
        kits = federation.kits
        age(federation.kit("site-2"), kits.parent / "state/cert.json", 361)
        federation.start("server", "site-1")
        federation.start("site-2", wait=0)
        assert "set the clock, or ask the hub" in {f.check: f for f in examine(federation.kit("site-2"))}["clock"].remedy
        time.sleep(8)
        assert "the kit's certificate is valid from" in federation.log("site-2")
        assert sites(federation) == {"site-1"}
        federation.kill("site-2")
        new = renew(federation.file, kits.parents[1])
        update_kit(federation.kit("site-2"), new / "site-2")
        federation.start("site-2")  # new certificate, new root; the server and site-1 have the old ones
        federation.kill("server")
        update_kit(federation.kit("server"), new / "localhost")
        federation.start("server")  # now the server is new, and site-1 old
        job = federation.submit(federation.export(small_config("fedit", rounds=1)))
        assert federation.wait(job) == "FINISHED:COMPLETED"
        (round,) = federation.events("concluded")
        assert round["sites"] == ["site-1", "site-2"]
        federation.shutdown()


@pytest.mark.slow
def test_certificates_that_ended_or_begin_later_are_named_at_the_site(tmp_path: Path) -> None:
    """The server sees no name of sites 1 and 2. It has had a heartbeat of site 3, whose certificate ends one minute later."""
    causes = {"site-1": Cause.ENDED, "site-2": Cause.EARLY}
    with Federation(tmp_path, {name: {} for name in (*causes, "site-3")}) as federation:
        state = federation.kits.parent / "state/cert.json"
        age(federation.kit("site-1"), state, 361)
        age(federation.kit("site-2"), state, -3, root=False)
        age(federation.kit("site-3"), state, 360 - 60 / 86400, root=False)
        federation.start("server", "site-3")
        for name, cause in causes.items():
            kit = federation.kit(name)
            assert admission_of(kit) == cause.remedy  # stopped: by its own clock
            (kit / STATE / connection_refusals.FILE).unlink()
            federation.start(name, wait=0)
            federation.until(lambda kit=kit, cause=cause: connection_refusals.noted_cause(kit) is cause, 60, "the cause")
            assert "the kit's certificate is valid from" in federation.log(name)
            assert admission_of(kit) == cause.remedy
            assert [one.labels for one in collect_metrics(kit) if one.name == "refused"] == [{"site": name, "cause": cause}]
        rows = json.loads(consilium(federation, "sites", "--format", "json"))["sites"]
        assert {row["site"] for row in rows} == {"site-3"}
        server, labels = federation.kit("server"), {"site": "site-3", "cause": Cause.ENDED}
        federation.until(lambda: "site-3" in read_attendance(server)["sites"], 30, "the list on disk")
        for name in ("site-1", "site-2", "site-3", "server"):
            federation.kill(name)
        federation.start("server", wait=0)
        federation.until(lambda: [one.labels for one in collect_metrics(server) if one.name == "refused"] == [labels], 90, "it")
        rows = json.loads(consilium(federation, "sites", "--format", "json"))["sites"]
        assert {row["site"]: row["state"] for row in rows} == {"site-3": "ended"}


@pytest.mark.slow
def test_revoked_hospital_needs_a_later_kit(tmp_path: Path) -> None:
    with Federation(tmp_path, {"site-1": {}, "site-2": {}, "site-3": {}}) as federation:
        federation.start()
        job = federation.submit(federation.export(small_config("fedit", rounds=40)))
        federation.until(lambda: federation.concluded() >= 1, 90, "round 1")
        revoke("site-3", federation.kit("server"))
        done = federation.concluded()
        federation.until(lambda: federation.concluded() >= done + 3, 60, "three rounds more")
        assert federation.events("concluded")[-1]["sites"] == ["site-1", "site-2"]
        reasons = {e["reason"] for e in federation.events("refused") if e["site"] == "site-3"}
        assert any("revoked" in reason for reason in reasons)
        federation.abort(job)
        federation.until(lambda: sites(federation) == {"site-1", "site-2"}, 60, "site-3 to be out")
        federation.until(lambda: "does not let this site in: revoked: " in federation.log("site-3"), 60, "its own word of it")
        federation.kill("site-3")
        kit = federation.kit("site-3")
        assert admission_of(kit) == Cause.REVOKED.remedy  # stopped: the doctor registers
        (kit / STATE / connection_refusals.FILE).unlink()
        federation.start("site-3", wait=0)
        federation.until(lambda: connection_refusals.noted_cause(kit) is Cause.REVOKED, 60, "the cause at the site")
        federation.until(lambda: "its credential was revoked" in federation.log("server"), 60, "the refusal")
        time.sleep(3)
        assert sites(federation) == {"site-1", "site-2"}
        assert "System is in trouble" not in federation.log("site-3")
        assert "Login failed" not in federation.log("site-3")
        assert admission_of(kit) == Cause.REVOKED.remedy  # it runs: the doctor asks it
        rows = json.loads(consilium(federation, "sites", "--format", "json"))["sites"]
        assert {row["site"]: row["state"] for row in rows} == {"site-1": "here", "site-2": "here", "site-3": "revoked"}
        for name in ("server", "site-3"):
            assert [one.labels for one in collect_metrics(federation.kit(name)) if one.name == "refused"] == [
                {"site": "site-3", "cause": "revoked"}
            ]
        with pytest.raises(ConfigError, match="stop it first: consilium stop"):
            update_kit(kit, kit)
        federation.kill("site-3")
        new = renew(federation.file, federation.kits.parents[1], ["site-3"])
        update_kit(federation.kit("site-3"), new / "site-3")
        assert admission_of(kit) == ""
        federation.start("site-3")
        assert sites(federation) == {"site-1", "site-2", "site-3"}
        federation.until(lambda: connection_refusals.noted_cause(kit) is None, 60, "the site to know that it is in")
        federation.until((federation.kit("server") / STATE / READMITTED).is_file, 60, "the server to note it")
        federation.kill("server")
        federation.start("server")
        federation.until(lambda: sites(federation) == {"site-1", "site-2", "site-3"}, 90, "all sites to be back")
        assert connection_refusals.noted_cause(kit) is None
        federation.shutdown()


@pytest.mark.long
def test_causes_outlive_a_server_that_is_away_and_a_certificate_may_end_under_a_running_site(tmp_path: Path) -> None:
    """Site 3 is revoked; site 2's certificate ends, the connection breaks, and it is renewed. Site 1 shares its health."""
    names = {"site-1": {"health": "share"}, "site-2": {}, "site-3": {}}
    with Federation(tmp_path, names) as federation, Relay(federation.port) as line:
        state = federation.kits.parent / "state/cert.json"
        federation.reroute("site-2", line.port)
        age(federation.kit("site-2"), state, 360 - 40 / 86400)
        federation.start()
        revoke("site-3", federation.kit("server"))
        kit, revoked = federation.kit("site-2"), federation.kit("site-3")
        federation.until(lambda: "it stays until the connection breaks" in federation.log("site-2"), 90, "the line in the log")
        assert connection_refusals.noted_cause(kit) is None
        federation.until(lambda: connection_refusals.noted_cause(revoked) is Cause.REVOKED, 60, "the refusal at site 3")
        rows = {row["site"]: row for row in json.loads(consilium(federation, "sites", "--format", "json"))["sites"]}
        assert (rows["site-2"]["state"], rows["site-3"]["state"]) == ("here", "revoked")
        assert rows["site-2"]["notes"] == ["its certificate has ended: it is out once its connection breaks; `consilium renew`"]
        assert rows["site-1"]["health"].keys() == {"disk_free", "memory_free", "memory", "gpus"}
        assert (rows["site-2"]["health"], rows["site-3"]["health"]) == (None, None)
        assert "GiB of disk free" in consilium(federation, "sites")
        line.reset()
        federation.until(lambda: connection_refusals.noted_cause(kit) is Cause.ENDED, 150, "the cause at site 2")
        assert [one.labels["cause"] for one in collect_metrics(kit) if one.name == "refused"] == ["ended"]
        new = renew(federation.file, federation.kits.parents[1], ["site-2"])
        with pytest.raises(ConfigError, match="stop it first"):
            update_kit(kit, new / "site-2")
        update_kit(kit, new / "site-2", running=True)  # no restart: its next connection has the new certificate
        federation.until(lambda: connection_refusals.noted_cause(kit) is None, 60, "site 2 to be back")
        federation.until(lambda: certificate_days(federation, "site-2") > 300, 60, "its new certificate in the list")
        federation.kill("server")
        time.sleep(25)  # four heartbeats without an answer
        assert connection_refusals.noted_cause(revoked) is Cause.REVOKED
        assert [one.labels["cause"] for one in collect_metrics(revoked) if one.name == "refused"] == ["revoked"]


def certificate_days(federation: Federation, site: str) -> int:
    rows = json.loads(consilium(federation, "sites", "--format", "json"))["sites"]
    return next(int(row["certificate_days_left"]) for row in rows if row["site"] == site)


def admission_of(kit: Path) -> str:
    """Return the remedy that the doctor names where the server does not let the site in; "" where it does."""
    return {one.check: one.remedy for one in examine(kit)}["admission"]


def sites(federation: Federation) -> set[str]:
    with federation.session(ADMIN) as session:
        return {client.name for client in session.get_system_info().client_info}
