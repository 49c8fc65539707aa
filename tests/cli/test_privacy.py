"""`consilium privacy plan` and `ledger`."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from opacus.accountants import RDPAccountant
from opacus.accountants.utils import get_noise_multiplier
from typer.testing import CliRunner

from consilium.cli.main import app
from consilium.core.errors import ConfigError, RefusedError
from consilium.privacy.accounting import DISCRETE, Entry
from consilium.privacy.audit_log import AuditLog
from consilium.privacy.ledger import Ledger
from tests.privacy.test_ledger import old_ledger

ONE = Entry("ward-7", "site", "zero-out", "local", "job", "run-1", 0, 0, 20.0, 1.0, 1, 0.3)


def call(*words: str) -> str:
    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_a_plan_per_accountant_with_other_deltas_and_the_noise_it_means() -> None:
    words = "privacy plan --epsilon 3 --delta 0.08333333333 --rounds 50 --phases 2 --sites 12 --format json"
    found = json.loads(call(*words.split()))["plans"]
    sigmas = {name: plan["noise_multiplier"] for name, plan in found.items()}
    assert sigmas == pytest.approx({"exact": 5.98, "prv": 6.0, "rdp": 7.07}, abs=0.006)
    assert found["exact"]["epsilon"]["1e-05"] == pytest.approx(8.04, abs=0.01)
    assert found["exact"]["noise_to_signal"]["central"] == pytest.approx(5.98 * (36 * 768 * 8) ** 0.5 / 12, rel=1e-3)
    assert found["exact"]["noise_to_signal"]["local"] > found["exact"]["noise_to_signal"]["central"]


@pytest.mark.parametrize(
    ("words", "distributed"),
    [
        ("--epsilon 6 --rounds 100 --sites 12 --parameters 221184", 1037 * (12 / 8) ** 0.5 / 12**0.5),
        ("--epsilon 8 --rounds 20 --sites 12 --parameters 128", 3.1),
        ("--epsilon 8 --rounds 20 --sites 50 --parameters 128", 0.75),
        ("--epsilon 6 --rounds 100 --sites 12 --parameters 221184 --threshold 12 --colluders 0", 299),
    ],
)
def test_shares_of_noise_are_between_the_sites_own_and_a_trusted_servers(words: str, distributed: float) -> None:
    """1037 by local noise, 299 by a server's; of 12 sites 9 are in a sum at least, and one of these may collude."""
    found = json.loads(call("privacy", "plan", *words.split(), "--accountant", "exact", "--format", "json"))
    ratios = found["plans"]["exact"]["noise_to_signal"]
    assert ratios["distributed"] == pytest.approx(distributed, rel=0.01)
    assert ratios["central"] <= ratios["distributed"] <= ratios["local"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--sites 12 --threshold 20", "--threshold: 20: of 12 sites with 1 colluders use 7 to 12"),
        ("--sites 12 --threshold 6", "--threshold: 6: of 12 sites with 1 colluders use 7 to 12"),
        ("--sites 12 --threshold 8 --colluders 4", "--threshold: 8: of 12 sites with 4 colluders use 9 to 12"),
        ("--sites 3 --threshold 3 --colluders 2", "there can be none"),
    ],
)
def test_a_threshold_that_no_site_would_accept_is_refused(words: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        call("privacy", "plan", "--epsilon", "6", "--rounds", "10", *words.split())


def test_a_plan_of_steps_over_all_sites_counts_samples() -> None:
    """Against Opacus: 200 steps at rate 0.01 with this noise cost epsilon 8."""
    words = "privacy plan --epsilon 8 --rounds 200 --sites 12 --sample-rate 0.01 --accountant rdp --format json"
    found = json.loads(call(*words.split()))["plans"]["rdp"]
    theirs = RDPAccountant()
    theirs.history = [(found["noise_multiplier"], 0.01, 200)]
    assert theirs.get_epsilon(1e-5) == pytest.approx(8, rel=0.01)
    assert "distributed" not in found["noise_to_signal"]


def test_a_plan_by_the_paper_s_calibration_shows_its_noise_and_what_that_keeps() -> None:
    """Opacus' sigma of 250 batches of 12 x 11 of 6400 images, over sqrt(36 tensors x 12 sites)."""
    sigma = get_noise_multiplier(target_epsilon=1, target_delta=1 / 12, sample_rate=132 / 6400, steps=250, accountant="rdp")
    words = "privacy plan --epsilon 1 --rounds 50 --phases 2 --sites 12 --accountant exact --calibration paper --samples 6400"
    words += " --batch-size 11 --local-steps 5"
    found = json.loads(call(*words.split(), "--format", "json"))
    assert found["asked"]["paper"] == {"samples": 6400, "batch_size": 11, "local_steps": 5, "tensors": 36}
    assert found["plans"]["exact"]["noise_multiplier"] == pytest.approx(sigma / (36 * 12) ** 0.5)
    assert found["plans"]["exact"]["epsilon"]["1e-05"] > 1000
    with pytest.raises(ConfigError, match="give --samples"):
        call(*words.replace(" --samples 6400", "").split())


def test_a_step_s_noise_is_that_of_the_sites_that_answer() -> None:
    """Twelve add a share each of what nine less one colluder hold for certain: sqrt(12 / 8) of it."""
    words = "privacy plan --epsilon 8 --rounds 200 --sites 12 --sample-rate 0.02 --accountant prv"
    text = call(*words.split())
    (whole,), (least,) = (re.findall(rf"{said} ([\d.]+)", text) for said in ("where all sites answer:", "at least"))
    assert float(whole) == pytest.approx(float(least) * 1.5**0.5, rel=1e-3)
    assert f"at least {least}, what the 8 that" in text
    with pytest.raises(ConfigError, match="--sites: 2 with 5 colluders"):
        call(*words.split(), "--sites", "2", "--colluders", "5")


@pytest.mark.parametrize("words", ["--accountant moments", "--delta 2"])
def test_wrong_wishes_are_named(words: str) -> None:
    with pytest.raises(ConfigError):
        call("privacy", "plan", "--epsilon", "3", "--rounds", "5", *words.split())


def test_a_ledger_is_read_by_file_folder_or_site(tmp_path: Path) -> None:
    path = tmp_path / "sites" / "a" / "ledger.sqlite"
    Ledger(path).charge_once(ONE, {})
    Ledger(path).charge_once(replace(ONE, round=1), {})
    (tmp_path / "site.yaml").write_text("privacy: {ledger: sites/a/ledger.sqlite, budgets: {site: {epsilon: 3}}}")
    for where in (path, tmp_path, tmp_path / "site.yaml"):
        (found,) = json.loads(call("privacy", "ledger", str(where), "--format", "json"))["data_sets"]
        assert (found["dataset"], found["releases"], found["adjacency"]) == ("ward-7", 2, "zero-out")
    text = call("privacy", "ledger", str(tmp_path / "site.yaml"), "--rows")
    assert "site level, zero-out, trust local" in text
    assert "one site: epsilon 0.2335 at delta 1e-05; budget 3 at delta 1e-05, 2.766 left" in text
    assert "round 1 phase 0" in text


def test_a_kits_site_yaml_is_of_its_kit_however_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From inside KIT/local, and by a link, the whole budget seemed to be left."""
    kit, central = tmp_path / "kit", tmp_path / "central.yaml"
    for name in ("startup", "local/custom"):
        (kit / name).mkdir(parents=True)
    (kit / "local/site.yaml").write_text("privacy: {budgets: {site: {epsilon: 3}}}")
    Ledger(kit / "_consilium/ledger.sqlite").charge_once(ONE, {})
    (tmp_path / "link.yaml").symlink_to(kit / "local/site.yaml")
    for folder, where in (
        ("local", "site.yaml"),
        ("local/custom", "../site.yaml"),
        ("", "local/site.yaml"),
        ("", "."),
        ("", str(tmp_path / "link.yaml")),
    ):
        monkeypatch.chdir(kit / folder)
        assert "ward-7: 1 release, of job;" in call("privacy", "ledger", where), (folder, where)
    (kit / "local/site.yaml").rename(central)
    (kit / "local/site.yaml").symlink_to(central)  # the site does not look beside its target
    monkeypatch.chdir(kit / "local")
    assert "ward-7: 1 release, of job;" in call("privacy", "ledger", "site.yaml")


def test_releases_are_charged_phases_and_no_steps(tmp_path: Path) -> None:
    """DP-SGD writes a row with its steps before training, and one without steps with the release. A budget may be overspent."""
    step = replace(ONE, unit="record", noise_multiplier=1.1, sample_rate=0.1, count=20, mechanism=DISCRETE)
    (tmp_path / "site.yaml").write_text("privacy: {ledger: l.sqlite, budgets: {record: {epsilon: 0.5}, site: {epsilon: 3}}}")
    for round in (0, 1):
        Ledger(tmp_path / "l.sqlite").charge_once(replace(step, round=round), {})
        Ledger(tmp_path / "l.sqlite").charge_once(replace(step, round=round, count=0, digest="ab"), {})
    (found,) = json.loads(call("privacy", "ledger", str(tmp_path / "site.yaml"), "--format", "json"))["data_sets"]
    assert (found["releases"], found["steps"]) == (2, 40)
    assert found["budgets"]["record"] == {"epsilon": 0.5, "delta": 1e-5, "left": 0.0}
    assert found["budgets"]["site"]["left"] == 0.0  # record-level noise bounds nothing for the site
    assert "ward-7: 2 releases in 40 steps with noise, of job;" in call("privacy", "ledger", str(tmp_path / "site.yaml"))


def test_a_ledger_that_lacks_rows_shows_those_that_it_has_and_fails(tmp_path: Path) -> None:
    """A lost file counted as one of a site that has released nothing, and a backup as whole."""
    (tmp_path / "site.yaml").write_text("state: state")
    ledger, record = Ledger(tmp_path / "state" / "ledger.sqlite"), AuditLog(tmp_path / "state" / "runs" / "r" / "audit.jsonl")
    backups = []
    for round in (0, 1):
        ledger.charge_once(replace(ONE, round=round), {})
        record.add({"kind": "update", "round": round, "ledger": ledger.seal()})
        backups.append(ledger.path.read_bytes())
    words = ["privacy", "ledger", str(tmp_path / "site.yaml")]
    assert "2 releases" in call(*words)
    ledger.path.write_bytes(backups[0])
    found = CliRunner().invoke(app, words)
    assert "1 release," in found.stdout
    assert "the privacy ledger lacks rows: " in str(found.exception)
    ledger.path.unlink()
    with pytest.raises(RefusedError, match=r"ledger is gone: .*`consilium privacy accept`"):
        call(*words, "--format", "json")


def test_no_ledger_is_said_plainly(tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text("privacy: {ledger: l.sqlite}")
    assert "nothing was released yet" in call("privacy", "ledger", str(tmp_path / "site.yaml"))
    (tmp_path / "site.yaml").write_text("privacy: {ledger: l.sqlite, budgets: {site: {epsilon: 3}}}")
    text = call("privacy", "ledger", str(tmp_path / "site.yaml"))
    told = "no such file: nothing was released yet; the whole budget is left (one site: epsilon 3 at delta 1e-05)\n"
    assert text == f"{tmp_path / 'l.sqlite'}: {told}"
    with pytest.raises(ConfigError, match="no ledger there"):
        call("privacy", "ledger", str(tmp_path / "none.sqlite"))


def test_noise_from_a_seed_is_called_what_it_is(tmp_path: Path) -> None:
    Ledger(tmp_path / "ledger.sqlite").charge_once(replace(ONE, private=False), {})
    assert "NOT PRIVATE" in call("privacy", "ledger", str(tmp_path))


def test_rows_whose_noise_can_be_taken_off_are_called_void_and_still_count(tmp_path: Path) -> None:
    """Also with budgets: epsilon is the same as of a row of this version."""
    new = replace(ONE, unit="record", noise_multiplier=1.1, sample_rate=0.1, count=20, mechanism=DISCRETE)
    old_ledger(tmp_path / "old" / "ledger.sqlite", replace(new, mechanism=""), ONE)
    Ledger(tmp_path / "new" / "ledger.sqlite").charge_once(new, {})
    Ledger(tmp_path / "new" / "ledger.sqlite").charge_once(ONE, {})
    text, fresh = (call("privacy", "ledger", str(tmp_path / name), "--rows") for name in ("old", "new"))
    assert "1 rows are void" in text
    assert "(record)  job run-1 round 0 phase 0: noise multiplier 1.1, rate 0.1, x 20 (void)" in text
    assert "void" not in fresh
    old, same = (
        json.loads(call("privacy", "ledger", str(tmp_path / n), "--format", "json"))["data_sets"][0] for n in ("old", "new")
    )
    assert (old["void"], same["void"]) == (1, 0)
    assert old["epsilon"] == same["epsilon"]
