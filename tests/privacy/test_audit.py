"""The record of what leaves a site: complete, equal to what was sent, and altered nowhere without showing."""

import json
import math
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
from typer.testing import CliRunner

from consilium.cli.main import app
from consilium.cli.site_records import markdown
from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.core.errors import ConfigError, RefusedError
from consilium.core.storage import load_state
from consilium.federation.job_assembly import Job
from consilium.flare.kit.evidence_archive import verify_chains
from consilium.privacy import audit_log
from consilium.privacy.accounting import gaussian_epsilon
from consilium.privacy.ledger import Ledger, summary
from consilium.runtime.engine import simulate
from consilium.strategies.strategy import Role
from tests.conftest import assembled, small_config, training_only

SITES = {f"site-{i}": SiteConfig() for i in (1, 2)}
MakeJob = Callable[..., Job]


def run(job: Job, folder: Path) -> Path:
    """Simulate and return site-1's record."""
    simulate(job, SITES, folder, lambda event: None)
    return record_of(folder)


def test_every_message_is_on_record_as_it_left(small_job: MakeJob, tmp_path: Path) -> None:
    job = small_job("fediat", rounds=1, local_steps=1)
    path = run(job, tmp_path)
    messages = audit_log.read_with_epsilon(path)["messages"]
    assert [m["kind"] for m in messages] == ["hello", "update", "evaluation"]
    assert messages[0]["values"]["num_samples"] == 4
    last, shared = messages[1], job.strategy.names(job.initial, Role.SHARED, 0, 0)
    assert last["tensors"].keys() == set(shared)
    kept, _ = load_state(path.with_name("state.safetensors"))
    for name in shared:
        sent = kept[f"reply/{name}"]
        assert last["tensors"][name]["shape"] == list(sent.shape)
        assert last["tensors"][name]["bytes"] == sent.numel() * 4
        assert last["tensors"][name]["norm"] == pytest.approx(float(sent.norm()), rel=1e-6)
    assert "validation/personalized/dice" in last["metrics"]
    assert messages[2]["tensors"] == {}
    assert not any("privacy" in m for m in messages)
    table = markdown(audit_log.read_with_epsilon(path)).partition("Values that left beside tensors")[2]
    names = {name for m in messages for part in ("values", "scalars", "metrics") for name in m.get(part, {})}
    assert len(names) > 12  # more than the table of messages has room for
    assert [name for name in sorted(names) if f"| {name} |" not in table.replace("\\_", "_")] == []
    assert "| num_samples | 1 | 4 |" in table.replace("\\_", "_")


def private(**section: object) -> Job:
    raw = training_only(small_config("fedit", local_steps=1)).model_dump()
    return assembled(JobConfig.model_validate(raw | {"privacy": section}))


@pytest.fixture(scope="module")
def private_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folders of a private run at site level and of one at record level."""
    folders = {unit: tmp_path_factory.mktemp(unit) for unit in ("site", "record")}
    for (unit, folder), clip in zip(folders.items(), (0.5, 1.0), strict=True):
        run(private(unit=unit, clip=clip, noise_multiplier=3.0), folder)
    return folders


def record_of(folder: Path) -> Path:
    """Return site-1's record of a run."""
    (path,) = (folder / "sites" / "site-1").rglob(audit_log.FILE)
    return path


def test_a_records_folder_is_for_its_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "state" / audit_log.FILE
    audit_log.AuditLog(path).add({"kind": "hello"})
    assert [one.stat().st_mode & 0o077 for one in (path, path.parent)] == [0, 0]


@pytest.mark.parametrize("unit", ["site", "record"])
def test_epsilon_on_record_is_the_ledgers(unit: str, private_runs: dict[str, Path]) -> None:
    (spent,) = summary(Ledger(private_runs[unit] / "sites/site-1/ledger.sqlite"))
    releases = [m["privacy"] for m in audit_log.read_with_epsilon(record_of(private_runs[unit]))["messages"] if "privacy" in m]
    assert len(releases) == 2
    assert releases[-1]["epsilon"] == pytest.approx(spent["epsilon"][unit]["1e-05"])
    assert releases[0]["epsilon"] < releases[1]["epsilon"]


def test_the_norm_on_record_is_that_of_the_noised_update(private_runs: dict[str, Path]) -> None:
    messages = audit_log.read_with_epsilon(record_of(private_runs["site"]))["messages"]
    (first, _) = (m["tensors"] for m in messages if m["kind"] == "update")
    norm = math.sqrt(sum(t["norm"] ** 2 for t in first.values()))
    count = sum(t["bytes"] // 4 for t in first.values())
    assert norm == pytest.approx(3.0 * 0.5 * math.sqrt(count), rel=0.05)


def test_a_message_again_has_one_line_and_any_change_shows(tmp_path: Path) -> None:
    path = tmp_path / "run" / audit_log.FILE
    for number in (1, 2, 3, 1):
        audit_log.AuditLog(path).add({"kind": "hello", "values": {"n": number}})
    whole = path.read_text().splitlines()
    assert len(whole) == 3
    assert audit_log.read_with_epsilon(path)["broken_line"] is None
    path.write_text("\n".join([whole[0], whole[1].replace('"n": 2', '"n": 7'), whole[2]]) + "\n")
    assert audit_log.read_with_epsilon(path)["broken_line"] == 3
    path.write_text("\n".join([whole[0], whole[2]]) + "\n")
    assert audit_log.read_with_epsilon(path)["broken_line"] == 2
    seal = audit_log.read_with_epsilon(path)["seal"]
    path.write_text("\n".join([whole[1], "x", whole[2]]) + "\n")  # the first of three
    assert audit_log.read_with_epsilon(path)["broken_line"] == 1
    path.write_text("\n".join(whole[:2]) + "\n")  # a cut end follows; only the seal tells
    assert audit_log.read_with_epsilon(path)["broken_line"] is None
    assert audit_log.read_with_epsilon(path)["seal"] != seal


def test_equal_refusals_are_counted_and_two_writers_make_one_chain(tmp_path: Path) -> None:
    path = tmp_path / audit_log.FILE
    one, other = audit_log.AuditLog(path), audit_log.AuditLog(path)
    for record in (one, other, one, one, other):
        record.add({"kind": "refusal", "reason": "task"}, again=True)
    other.add({"kind": "hello"})
    one.add({"kind": "hello"})
    assert [m["kind"] for m in audit_log.read_with_epsilon(path)["messages"]] == [*["refusal"] * 5, "hello"]
    assert audit_log.read_with_epsilon(path)["broken_line"] is None


def test_what_cannot_be_recorded_does_not_leave(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file where a folder must be")
    with pytest.raises(RefusedError, match="cannot be written"):
        audit_log.AuditLog(tmp_path / "run" / audit_log.FILE).add({"kind": "hello"})


def test_what_could_not_be_written_is_not_known_when_it_comes_again(tmp_path: Path) -> None:
    record = audit_log.AuditLog(tmp_path / audit_log.FILE)
    with (
        patch("consilium.privacy.audit_log.os.fsync", side_effect=OSError(28, "No space left")),
        pytest.raises(RefusedError),
    ):
        record.add({"kind": "hello"})
    record.path.write_text("")  # nothing of it has reached the disk
    record.add({"kind": "hello"})
    record.add({"kind": "hello"})
    assert [line["kind"] for line in audit_log.read_with_epsilon(record.path)["messages"]] == ["hello"]


def test_a_disk_that_is_full_within_a_line_leaves_no_half_of_it(tmp_path: Path) -> None:
    record, limits = audit_log.AuditLog(tmp_path / audit_log.FILE), resource.getrlimit(resource.RLIMIT_FSIZE)
    record.add({"kind": "hello"})
    resource.setrlimit(resource.RLIMIT_FSIZE, (record.path.stat().st_size + 40, limits[1]))
    try:
        with pytest.raises(RefusedError, match=r"No space left on device"):
            record.add({"kind": "update"})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    for one in (record, audit_log.AuditLog(record.path)):
        one.add({"kind": "update"})
    found = audit_log.read_with_epsilon(record.path)
    assert ([line["kind"] for line in found["messages"]], found["broken_line"]) == (["hello", "update"], None)


@pytest.mark.parametrize(("text", "broken"), [('{"kind": "hello", "previous": ""}', None), ("[1]\n", 1)])
def test_nothing_is_written_behind_half_a_line_or_one_that_is_no_map(text: str, broken: int | None, tmp_path: Path) -> None:
    (tmp_path / audit_log.FILE).write_text(text)
    assert audit_log.read_with_epsilon(tmp_path / audit_log.FILE)["broken_line"] == broken
    with pytest.raises(RefusedError, match="a line is damaged"):
        audit_log.AuditLog(tmp_path / audit_log.FILE).add({"kind": "update"})
    assert (tmp_path / audit_log.FILE).read_text() == text


SPEND = {"noise_multiplier": 2.0, "sample_rate": 1.0, "count": 1, "slack": 0.0}


def spends(folder: Path, *events: dict) -> Path:
    """Write a record of one release a round, of these costs, and return it."""
    record = audit_log.AuditLog(folder / audit_log.FILE)
    for round, spend in enumerate(events):
        record.add({"kind": "update", "round": round, "phase": 0, "privacy": {"delta": 1e-5, "spend": spend}})
    return record.path


def test_epsilon_goes_by_what_was_spent_so_far_and_a_place_counts_once(tmp_path: Path) -> None:
    """Gaussians of multiplier 2 and 1 are one of 1 / sqrt(1/4 + 1); round 0 is charged as it was released last."""
    path = spends(tmp_path, SPEND, SPEND | {"noise_multiplier": 1.0})
    audit_log.AuditLog(path).add(
        {"round": 0, "phase": 0, "privacy": {"delta": 1e-5, "spend": SPEND | {"noise_multiplier": 4.0}}}
    )
    found = [line["privacy"]["epsilon"] for line in audit_log.read_with_epsilon(path)["messages"]]
    expected = [gaussian_epsilon(mu, 1e-5) for mu in (1 / 2, (1 / 4 + 1) ** 0.5, (1 / 16 + 1) ** 0.5)]
    assert found == pytest.approx(expected, abs=1e-8)


def test_a_record_is_verified_without_counting_what_it_spent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signed archive may hold any number of costs, each of which takes an accountant a while."""
    path = spends(tmp_path, *(SPEND | {"noise_multiplier": 1 + n / 7, "sample_rate": 0.1} for n in range(50)))
    monkeypatch.setattr(audit_log, "epsilon_of", lambda *_: pytest.fail("counted"))
    assert verify_chains({"audit-1.jsonl": path.read_bytes()}) == {"messages": 50, "record": None, "rows": 0, "ledger": None}


@pytest.mark.parametrize(
    "change",
    [
        {"noise_multiplier": -1.0},
        {"noise_multiplier": 1e-300},
        {"noise_multiplier": math.nan},
        {"sample_rate": 2},
        {"count": 1.5},
        {"count": 2**60},
        {"slack": "0"},
        {"more": 1},
    ],
)
def test_a_cost_that_nobody_could_count_is_damage_by_its_line(change: dict, tmp_path: Path) -> None:
    path = tmp_path / audit_log.FILE
    spends(tmp_path, SPEND)
    line = {
        "round": 1,
        "phase": 0,
        "privacy": {"delta": 1e-5, "spend": SPEND | change},
        "previous": audit_log.read_with_epsilon(path)["seal"],
    }
    path.write_text(path.read_text() + json.dumps(line) + "\n")
    for found in (audit_log.load_record(path), audit_log.read_with_epsilon(path)):
        assert (found["broken_line"], len(found["messages"])) == (2, 1)
    assert verify_chains({"audit-1.jsonl": path.read_bytes()})["record"] == "audit-1.jsonl, line 2"


@pytest.mark.parametrize(
    "change",
    [
        {"privacy": {"delta": 1e-5, "spend": SPEND, "clip": "x"}},
        {"tensors": [1]},
        {"time": "x"},
        {"masked": 3},
        {"scalars": [1]},
    ],
)
def test_a_message_that_no_guard_writes_ends_in_a_line(change: dict, tmp_path: Path) -> None:
    (tmp_path / audit_log.FILE).write_text(
        json.dumps({"time": 1.0, "kind": "update", "round": 0, "phase": 0, "previous": ""} | change)
    )
    with pytest.raises(ConfigError, match=r"audit\.jsonl: .*copy"):
        CliRunner().invoke(app, ["audit", str(tmp_path)], catch_exceptions=False)


def test_the_command_prints_a_page_and_json_and_tells_a_change(private_runs: dict[str, Path], tmp_path: Path) -> None:
    path = record_of(shutil.copytree(private_runs["site"], tmp_path, dirs_exist_ok=True))
    site = tmp_path / "local" / "site.yaml"
    site.parent.mkdir()
    site.write_text(f"state: {tmp_path / 'sites' / 'site-1'}\n")
    assert CliRunner().invoke(app, ["audit", str(tmp_path / "local/site.yaml")]).output
    page = CliRunner().invoke(app, ["audit", str(tmp_path)])  # as a startup kit
    assert page.exit_code == 0
    assert "# What left site-1: small, run " in page.output
    assert "site level, zero-out, trust local; clip 0.5, noise multiplier 3)" in page.output
    assert page.output.count("| update |") == 2
    assert "image_encoder.blocks.0.attn.qkv.lora_A | 4x128 | float32 | 2 |" in page.output
    found = json.loads(CliRunner().invoke(app, ["audit", str(tmp_path / "sites"), "--format", "json"]).output)
    assert len(found) == 2
    assert all(one["broken_line"] is None for one in found)
    path.write_text(path.read_text().replace('"round": 0', '"round": 1'))
    altered = CliRunner().invoke(app, ["audit", str(path)])
    assert altered.exit_code == 1
    assert "altered: line 3" in altered.output


MASKED = {"kind": "update", "masked": {"threshold": 2, "asked": 3}}
HIDDEN = "no noise; updates left under masks, which hide within this run; over many runs only noise protects"


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([{"kind": "hello"}, {"kind": "refusal", "reason": "budget"}], "no update and no model left"),
        ([MASKED], HIDDEN),
        ([MASKED | {"masked": {"threshold": 2, "asked": 3, "sites": ["a", "b", "c"]}}], f"{HIDDEN}; summed with: a, b, c"),
        ([MASKED, {"kind": "model"}], "none; updates left as trained"),
        ([{"kind": "update"}], "none; updates left as trained"),
    ],
)
def test_the_page_says_what_protected_tensors_that_left(messages: list[dict], said: str) -> None:
    sent = {"tensors": {"w": {"shape": [2], "dtype": "float32", "bytes": 8, "norm": 1.0}}}
    about = {"time": 0.0, "site": "a", "round": 0, "phase": 0}
    lines = [about | (sent if one["kind"] in ("update", "model") else {}) | one for one in messages]
    page = markdown({"file": "f", "seal": "s", "broken_line": None, "messages": lines})
    assert f"- privacy: {said}\n" in page
