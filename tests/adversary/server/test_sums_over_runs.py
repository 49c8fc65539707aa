"""A server that subtracts sums of several runs. Each run's masks hold, training repeats, and nobody lies."""

import json
import shlex
import shutil
import threading
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from consilium import __version__
from consilium.cli.main import app
from consilium.client.build import build_guard
from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig, load_site
from consilium.core.errors import ConfigError, ConsiliumError, RefusedError
from consilium.core.messages import Hello, Kind, Payload, Tensors
from consilium.core.seeding import seed_for
from consilium.data.synthetic.phantoms import make_phantoms
from consilium.federation.job_assembly import Job
from consilium.privacy import audit_log
from consilium.privacy.guard.release import upload_shapes
from consilium.privacy.secagg import sum_ledger
from consilium.privacy.secagg.certificates import make_simulated_identities, read_root, read_simulated_identity
from consilium.privacy.secagg.sum_ledger import SumLedger
from consilium.runtime.engine import LocalTransport
from consilium.runtime.worker_pool import SimulatedSite
from consilium.server.coordinator import Coordinator
from consilium.server.masked_round import MaskedRounds
from tests.conftest import assembled, small_config, training_only

FOUR = ["site-1", "site-2", "site-3", "site-4"]
SHARED_BY_ONE = pytest.param(["site-1", "site-4", "site-5"], 1, marks=pytest.mark.slow)
THREE = FOUR[:3]
SAMPLES = {name: 10 * number for number, name in enumerate([*FOUR, "site-5", "site-6"], 1)}
NOISE = {"unit": "site", "trust": "distributed", "noise_multiplier": 1.0, "clip": 1.0}


def job_of(**sections: Any) -> Job:
    """Return a masked job of one round; `sections` replace or extend those of the small job."""
    raw = training_only(small_config("fedit", rounds=1)).model_dump()
    raw["federation"]["min_sites"] = 3
    raw["secure_aggregation"] = {}
    for name, values in sections.items():
        raw[name] = raw[name] | values if isinstance(raw[name], dict) and "kind" not in values else values
    return assembled(JobConfig.model_validate(raw))


class Repeats:
    """A site whose training repeats: its update is the same numbers in every run, up to the learning rate."""

    def __init__(self, name: str, job: Job) -> None:
        self.name, self.job = name, job

    def hello(self, run: str) -> Hello:
        return Hello(self.name, 0, False, __version__)

    def train(self, run: str, payload: Payload) -> Payload:
        return Payload(0, 0, {n: update(self.name, n, s) for n, s in upload_shapes(self.job.strategy, payload).items()})


def update(site: str, tensor: str, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed_for(7, site, tensor))) / 50


class Hospitals:
    """Hospitals on kits of their own, whose state outlives runs, and a curious server that keeps every sum."""

    def __init__(self, folder: Path, identities: Path) -> None:
        self.folder, self.identities, self.runs, self.events = folder, identities, 0, list[Any]()
        for name in SAMPLES:
            (folder / name / "local").mkdir(parents=True)
            (folder / name / "local" / "site.yaml").write_text("state: ../state\n")

    def kit(self, name: str) -> Path:
        return self.folder / name

    def records(self, name: str) -> Path:
        return self.folder / name / "state"

    def site(self, name: str) -> SiteConfig:
        return load_site(self.kit(name) / "local" / "site.yaml")

    def member(self, job: Job, name: str, run: str) -> SimulatedSite:
        root, site = self.records(name), self.site(name)
        identity = read_simulated_identity(self.identities, name, site.secure_aggregation)
        guard = build_guard(job, name, site, root / "runs" / run, root, self.events.append, identity=identity)
        guard.num_samples = SAMPLES[name]
        trainer: Any = Repeats(name, job)
        return SimulatedSite(trainer, guard)

    def begin(self, names: Collection[str], job: Job, run: str = "", resume: bool = False) -> Any:
        """Return (coordinator, rounds, members) of a run, by default a new one."""
        self.runs += 1
        run = run or f"run-{self.runs}"
        members = {name: self.member(job, name, run) for name in names}
        coordinator = Coordinator(job, self.folder / "server" / run, self.events.append, resume)
        LocalTransport(coordinator, members).register(first=True)
        root = read_root(self.identities / "rootCA.pem")
        return coordinator, MaskedRounds(coordinator, root, "server"), members

    def sum(self, names: Collection[str], job: Job | None = None, run: str = "", resume: bool = False) -> Tensors:
        """Return the sum that the server has of one round: its mean times the public weights."""
        job = job or job_of()
        coordinator, rounds, members = self.begin(names, job, run, resume)
        try:
            rounds.run_phase(LocalTransport(coordinator, members).ask, lambda: None)
        finally:
            coordinator.close()
        weight = sum(SAMPLES[name] for name in names)
        state = coordinator.state
        return {n: (t.double() - job.initial[n].double()) * weight for n, t in state.shared.items()}

    def said(self, name: str) -> str:
        """Return the last refusal that a site has put on record."""
        lines = [
            line for path in self.records(name).rglob(audit_log.FILE) for line in audit_log.read_with_epsilon(path)["messages"]
        ]
        return max((line for line in lines if "what" in line), key=lambda line: line["time"])["what"]


@pytest.fixture(scope="module")
def identities(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("identities")
    make_simulated_identities(folder, list(SAMPLES))
    return folder


@pytest.fixture
def hospitals(tmp_path: Path, identities: Path) -> Hospitals:
    return Hospitals(tmp_path, identities)


def shows(more: Tensors, fewer: Tensors, name: str) -> bool:
    """Tell whether the difference of two sums is one hospital's own update."""
    found = {n: (more[n] - fewer[n]) / SAMPLES[name] for n in more}
    return all(torch.allclose(t, update(name, n, tuple(t.shape)).double(), atol=1e-5) for n, t in found.items())


@pytest.mark.parametrize("sets", [(THREE, FOUR), (FOUR, THREE)], ids=["joins", "leaves"])
def test_two_runs_do_not_show_the_hospital_that_joins_or_leaves(sets: Any, hospitals: Hospitals) -> None:
    first = hospitals.sum(sets[0])
    try:
        second = hospitals.sum(sets[1])
    except ConsiliumError as error:
        assert "say `sums`" in str(error)  # noqa: PT017 - the attack's success is the failure
    else:
        more, fewer = (second, first) if len(sets[1]) == 4 else (first, second)
        assert not shows(more, fewer, "site-4")
    assert "differ in site-4, whose updates the difference shows" in hospitals.said("site-1")
    assert not list((hospitals.folder / "server" / "run-2").rglob("masked-*"))  # before anything was masked


@pytest.mark.parametrize(
    "changed",
    [
        {"adapter": {"targets": "qv"}},
        pytest.param({"training": {"lr": 1e-4}}, marks=pytest.mark.slow),
        {"secure_aggregation": {"threshold": 4}},
        pytest.param({"adapter": {"kind": "bottleneck"}}, marks=pytest.mark.slow),
        pytest.param({"strategy": {"name": "ffa_lora"}}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_changed_job_changes_nothing_about_it(changed: dict, hospitals: Hospitals) -> None:
    hospitals.sum(THREE)
    with pytest.raises(ConsiliumError, match="3 of 4 sites say `sums`"):
        hospitals.sum(FOUR, job_of(**changed))


@pytest.mark.parametrize("rule", [{"max_weight": 30}, pytest.param({"weighting": "uniform"}, marks=pytest.mark.slow)], ids=str)
def test_the_same_hospitals_weighed_otherwise_do_not_show_the_largest(rule: dict, hospitals: Hospitals) -> None:
    """Of weights 10, 20, 30, 40 and 10, 20, 30, 30 the sums differ by ten times site-4's update."""
    hospitals.sum(FOUR)
    with pytest.raises(ConsiliumError, match="4 of 4 sites say `sums`"):
        hospitals.sum(FOUR, job_of(federation=rule))
    assert "federation.max_weight" in hospitals.said("site-1")
    hospitals.sum(FOUR, job_of(training={"lr": 1e-4}))


def allow_by_command(hospitals: Hospitals, names: Iterable[str]) -> None:
    """Let each administrator run the command that the last refusal of his hospital names."""
    for name in names:
        command = hospitals.said(name).partition("consilium ")[2].replace("KIT", str(hospitals.kit(name)))
        result = CliRunner().invoke(app, shlex.split(command.replace("TEXT", "agreed")))
        assert result.exit_code == 0, result.output
        assert "allowed: site-1, site-2, site-3, site-4" in result.output


def test_an_allowed_set_does_not_allow_another_weights_rule(hospitals: Hospitals) -> None:
    """site-4 works with the server. Weights 10, 20, 30, 40 and 10, 20, 20, 20 differ by site-3 and site-4, so show site-3."""
    first = hospitals.sum(THREE)
    with pytest.raises(ConsiliumError, match="say `sums`"):
        hospitals.sum(FOUR)
    allow_by_command(hospitals, THREE)
    lighter = job_of(federation={"max_weight": 20})
    with pytest.raises(ConsiliumError, match="3 of 4 sites say `sums`"):
        hospitals.sum(FOUR, lighter)
    assert shows(hospitals.sum(FOUR), first, "site-4")  # as its administrators have agreed
    shutil.rmtree(hospitals.records("site-4"))
    with pytest.raises(ConsiliumError, match="3 of 4 sites say `sums`"):
        hospitals.sum(FOUR, lighter)
    assert "--weights 'samples, at most 20'" in hospitals.said("site-1")
    allow_by_command(hospitals, THREE)
    hospitals.sum(FOUR, lighter)


def test_the_weights_rule_of_a_lost_ledger_of_sums_is_read_from_records(hospitals: Hospitals) -> None:
    hospitals.sum(THREE)
    for name in THREE:
        (hospitals.records(name) / sum_ledger.FILE).unlink()
        sum_ledger.accept_ledger(hospitals.records(name), "20261125-000000Z")
    with pytest.raises(ConsiliumError, match="3 of 3 sites say `sums`"):
        hospitals.sum(THREE, job_of(federation={"max_weight": 20}))
    hospitals.sum(THREE)


@pytest.mark.parametrize("rule", ["samples", "at most 20", "samples, at most many"])
def test_an_allowed_weights_rule_is_one_that_a_refusal_names(rule: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--weights: .*: copy the rule from the refusal, such as 'samples, at most 200'"):
        sum_ledger.allow(tmp_path, FOUR, "agreed", rule)


@pytest.mark.parametrize("option", ["--weights", "--reason"])
def test_options_of_an_allowed_set_need_the_set(option: str, tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text("{}")
    result = CliRunner().invoke(app, ["privacy", "sums", str(tmp_path / "site.yaml"), option, "uniform"])
    assert "--weights, --reason: only with --allow" in str(result.exception)


def test_an_epsilon_without_noise_worth_the_name_is_refused() -> None:
    """Epsilon 1000 over one release asks for noise of 0.02 of the clip: masked sums would count as noisy and be forgotten."""
    noise = {name: value for name, value in NOISE.items() if name != "noise_multiplier"}
    with pytest.raises(ConfigError, match=r"privacy\.epsilon: 1000.*lower epsilon"):
        job_of(privacy=noise | {"epsilon": 1000.0, "delta": 1e-5})


@pytest.mark.slow
def test_with_noise_hospitals_may_come_and_go(hospitals: Hospitals) -> None:
    hospitals.sum(THREE)
    hospitals.sum(FOUR, job_of(privacy=NOISE))
    hospitals.sum([*THREE, "site-5"], job_of(privacy=NOISE))
    with pytest.raises(ConsiliumError, match="say `sums`"):
        hospitals.sum(FOUR, job_of(privacy=NOISE | {"trust": "central"}))  # whose noise comes after the server has the sum


@pytest.mark.parametrize(("other", "shared"), [(["site-1", "site-2", "site-4"], 2), SHARED_BY_ONE])
def test_any_other_set_of_hospitals_is_refused(other: list[str], shared: int, hospitals: Hospitals) -> None:
    hospitals.sum(THREE)
    with pytest.raises(ConsiliumError, match=rf"{shared} of 3 sites say `sums`"):
        hospitals.sum(other)


@pytest.mark.slow
def test_an_administrator_lets_one_set_pass_by_the_command_that_the_refusal_names(hospitals: Hospitals) -> None:
    hospitals.sum(THREE)
    with pytest.raises(ConsiliumError, match="say `sums`"):
        hospitals.sum(FOUR)
    allow_by_command(hospitals, THREE)
    for name in THREE:
        (line,) = (one for one in audit_log.read_with_epsilon(hospitals.records(name) / audit_log.FILE)["messages"])
        assert (line["kind"], line["sites"], line["reason"]) == ("sum allowed", FOUR, "agreed")
    hospitals.sum(FOUR)
    hospitals.sum(THREE)
    with pytest.raises(ConsiliumError, match="say `sums`"):
        hospitals.sum([*THREE, "site-5"])


@pytest.mark.slow
def test_a_masked_update_that_left_counts_whether_its_sum_was_opened_or_not(hospitals: Hospitals) -> None:
    """The run is killed between the masked updates and the opening, and goes on later; meanwhile another set is refused."""
    coordinator, rounds, members = hospitals.begin(FOUR, job_of(), "study")

    def killed(kind: Kind, messages: dict, take: Callable, enough: Callable) -> None:
        if any(isinstance(one, dict) and one["step"] == "confirm" for one in messages.values()):
            raise KeyboardInterrupt
        LocalTransport(coordinator, members).ask(kind, messages, take, enough)

    with pytest.raises(KeyboardInterrupt):
        rounds.run_phase(killed, lambda: None)
    coordinator.close()
    with pytest.raises(ConsiliumError, match="3 of 3 sites say `sums`"):
        hospitals.sum(THREE)
    hospitals.sum(FOUR, run="study", resume=True)


@pytest.mark.slow
def test_a_run_that_nobody_was_masked_in_does_not_count(hospitals: Hospitals) -> None:
    """site-4 is lost after its hello, so the others have prepared and nothing else: a run without it may begin."""
    coordinator, rounds, members = hospitals.begin(FOUR, job_of())

    def ask(kind: Kind, messages: dict, take: Callable, enough: Callable) -> None:
        there = {n: m for n, m in messages.items() if n != "site-4" or m["step"] == "hello"}
        LocalTransport(coordinator, members).ask(kind, there, take, enough)

    with pytest.raises(ConsiliumError, match="site-4 not yet"):
        rounds.run_phase(ask, lambda: None)
    coordinator.close()
    hospitals.sum(THREE)


def test_of_two_runs_at_once_the_second_is_stopped_before_it_trains(hospitals: Hospitals) -> None:
    """Both have prepared, when neither was summed yet."""
    later, rounds, members = hospitals.begin(FOUR, job_of())

    def ask(kind: Kind, messages: dict, take: Callable, enough: Callable) -> None:
        if kind is Kind.TRAIN:
            hospitals.sum(THREE)
        LocalTransport(later, members).ask(kind, messages, take, enough)

    with pytest.raises(ConsiliumError, match="say `sums`"):
        rounds.run_phase(ask, lambda: None)
    later.close()
    assert [one["event"] for one in hospitals.events if one["event"] == "refused"] == ["refused"] * 3


def test_two_processes_that_write_at_once_do_not_both_pass(tmp_path: Path) -> None:
    sets, passed, barrier = (THREE, FOUR), list[Any](), threading.Barrier(2)

    def add(sites: Iterable[str]) -> None:
        barrier.wait()
        try:
            passed.append(SumLedger(tmp_path, ["ward"]).add(sites, "run"))
        except RefusedError:
            passed.append(None)

    threads = [threading.Thread(target=add, args=(one,)) for one in sets]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert passed.count(None) == 1
    assert len(sum_ledger.read(tmp_path / sum_ledger.FILE)) == 1


def cut(path: Path) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


HARMS: dict[str, Callable[[Path], object]] = {
    "lost": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "cut": cut,
    "edited": lambda path: path.write_text(path.read_text().replace("site-3", "site-9")),
    "damaged": lambda path: path.write_bytes(b"\xff\xfe{" * 50),
    "half a line": half,
}


def kept(folder: Path) -> Path:
    """Return the ledger of two sums over two data sets, whose updates are on record."""
    for number, sites in enumerate((THREE, ["site-1", "site-5", "site-6"])):
        ledger = SumLedger(folder, [("ward", "clinic")[number]])
        seal, masked = ledger.add(sites, f"run-{number}"), {"threshold": 3, "sites": sites}
        audit_log.AuditLog(folder / "runs" / str(number) / audit_log.FILE).add(
            {"kind": "update", "masked": masked, "sums": seal}
        )
    return ledger.path


@pytest.mark.parametrize("harm", HARMS)
def test_a_harmed_ledger_of_sums_is_noticed_and_what_it_said_is_read_from_records(harm: str, tmp_path: Path) -> None:
    path = kept(tmp_path)
    assert sum_ledger.check_and_count_lines(tmp_path) == 2
    HARMS[harm](path)
    left = path.read_bytes() if path.exists() else None
    with pytest.raises(RefusedError, match="the ledger of sums"):
        sum_ledger.check_and_count_lines(tmp_path)
    said = sum_ledger.accept_ledger(tmp_path, "20261125-000000Z")
    assert 1 <= len(said["lost_sums"]) <= 2
    if said["sums_set_aside"]:
        assert Path(said["sums_set_aside"]).read_bytes() == left
    sum_ledger.check_and_count_lines(tmp_path)
    for sites in (FOUR, ["site-1", "site-5", "site-6", "site-2"]):
        with pytest.raises(RefusedError, match="and an earlier one differ in"):
            SumLedger(tmp_path, ["ward"]).check(sites)


def test_a_torn_line_costs_no_other_sum_though_no_record_is_left(tmp_path: Path) -> None:
    ledger = SumLedger(tmp_path, ["ward"])
    ledger.add(THREE, "run")
    SumLedger(tmp_path, ["clinic"]).add(["site-1", "site-5", "site-6"], "run")
    half(ledger.path)
    said = sum_ledger.accept_ledger(tmp_path, "20261125-000000Z")
    assert said["sums_set_aside"]
    assert [line["sites"] for line in sum_ledger.read(ledger.path)] == [THREE]
    with pytest.raises(RefusedError, match="differ in site-4"):
        SumLedger(tmp_path, ["ward"]).check(FOUR)


@pytest.mark.parametrize(
    ("field", "value"),
    [("sites", "site-1"), ("sites", ["site-1", 5]), ("data", None), ("data", [["ward"]]), ("weights", 1)],
)
def test_a_line_with_a_value_of_another_type_was_altered(field: str, value: object, tmp_path: Path) -> None:
    path = kept(tmp_path)
    first, last = path.read_text().splitlines()
    path.write_text("\n".join([first, json.dumps(json.loads(last) | {field: value})]) + "\n")
    with pytest.raises(RefusedError, match="was altered in line 2"):
        sum_ledger.read(path)


def test_an_accepted_loss_forgives_nothing_later(tmp_path: Path) -> None:
    path = kept(tmp_path)
    path.unlink()
    sum_ledger.accept_ledger(tmp_path, "first")
    seal = SumLedger(tmp_path, ["ward"]).add(THREE, "run-2")
    audit_log.AuditLog(tmp_path / "runs" / "2" / audit_log.FILE).add(
        {"kind": "update", "masked": {"sites": THREE}, "sums": seal}
    )
    sum_ledger.check_and_count_lines(tmp_path)
    cut(path)
    with pytest.raises(RefusedError, match="the ledger of sums lacks what"):
        sum_ledger.check_and_count_lines(tmp_path)


@pytest.mark.slow
def test_a_lost_ledger_of_sums_stops_jobs_until_it_is_accepted(hospitals: Hospitals) -> None:
    hospitals.sum(THREE)
    (hospitals.records("site-1") / sum_ledger.FILE).unlink()
    with pytest.raises(ConsiliumError, match="2 sites are here"):
        hospitals.sum(THREE)
    assert any("the ledger of sums lacks" in str(one.get("reason")) for one in hospitals.events)
    hospitals.sum(FOUR, job_of(privacy=NOISE))  # noise needs no such memory
    command = ["privacy", "accept", str(hospitals.kit("site-1")), "--reason", "disk failed", "--format", "json"]
    said = json.loads(CliRunner().invoke(app, command, catch_exceptions=False).stdout)
    assert len(said["lost_sums"]) == 1
    with pytest.raises(ConsiliumError, match="3 of 4 sites say `sums`"):
        hospitals.sum(FOUR)  # site-1's records of what left know whom it was summed with
    assert "differ in site-4" in hospitals.said("site-1")
    hospitals.sum(THREE)


def test_a_ledger_of_sums_that_is_lost_while_a_job_runs_is_noticed(tmp_path: Path) -> None:
    ledger = SumLedger(tmp_path, ["ward"])
    ledger.add(THREE, "run")
    ledger.path.unlink()
    with pytest.raises(RefusedError, match="lacks lines that it had a moment ago"):
        ledger.check(THREE)


@pytest.mark.parametrize("again", ["another name", "a link", "the same patients"])
def test_the_same_list_is_the_same_data_by_whatever_name(again: str, hospitals: Hospitals) -> None:
    made = make_phantoms(hospitals.folder / "lists", "fundus", "x", 0, 2, 0, 0, 64, 0.0, 0.0)
    link = hospitals.folder / "lists" / "link.json"
    link.symlink_to(made)
    first = {"ward-7": {"datalist": str(made), "patients": "p"}}
    second: dict[str, dict] = {
        "another name": {"ward-8": {"datalist": str(made)}},
        "a link": {"ward-7": {"datalist": str(link)}},
        "the same patients": {"ward-8": {"datalist": str(hospitals.folder / "lists" / "other.json"), "patients": "p"}},
    }[again]
    (hospitals.folder / "lists" / "other.json").write_bytes(made.read_bytes())

    def have(sets: dict) -> None:
        for name in SAMPLES:
            settings = json.dumps({"state": "../state", "datasets": sets})
            (hospitals.kit(name) / "local" / "site.yaml").write_text(settings)

    have(first)
    hospitals.sum(THREE)
    have(second)
    with pytest.raises(ConsiliumError, match="3 of 4 sites say `sums`"):
        hospitals.sum(FOUR)


def test_other_data_are_sums_of_their_own(tmp_path: Path) -> None:
    SumLedger(tmp_path, ["ward-7", "/a"]).add(THREE, "run")
    SumLedger(tmp_path, ["ward-8", "/b"]).check(FOUR)
    for data in (["ward-9", "/a"], ["ward-7", "/c"]):
        with pytest.raises(RefusedError, match="differ in site-4"):
            SumLedger(tmp_path, data).check(FOUR)
