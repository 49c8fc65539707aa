"""The server: bad results never reach the mean and never stop the round; quorum, sampling, checkpoint."""

import itertools
import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from consilium import __version__
from consilium.config.job import JobConfig
from consilium.core.errors import CheckpointError, ConfigError, ConsiliumError, Reason, RefusedError
from consilium.core.messages import HELD_OUT, Hello, Kind, Payload
from consilium.federation.job_assembly import Job, assemble_job
from consilium.report.run_record import read_run
from consilium.report.untrusted_files import read_lines
from consilium.runtime.engine import LocalTransport
from consilium.server.checks import check_next_state
from consilium.server.coordinator import Coordinator
from consilium.strategies.fedit import FedIT
from consilium.strategies.lora_fair import LoraFair
from consilium.strategies.strategy import Role, ServerState, Strategy
from tests.conftest import small_config

MakeJob = Callable[..., Job]


def coordinator(job: Job, folder: Path, sites: int = 3, **options: object) -> Coordinator:
    made = Coordinator(job, folder, lambda event: None, **options)
    for index in range(sites):
        made.welcome(Hello(f"site-{index}", 10 * (index + 1), False, __version__))
    return made


def update(job: Job, value: float, round: int = 0, phase: int = 0) -> Payload:
    names = job.strategy.names(job.initial, Role.SHARED, round, phase)
    return Payload(round, phase, {n: torch.full_like(job.initial[n], value) for n in names})


def test_sample_weighted_mean_whatever_the_order(small_job: MakeJob, tmp_path: Path) -> None:
    job = small_job("fedit")
    ends = []
    for number, order in enumerate(itertools.permutations(range(3))):
        server = coordinator(job, tmp_path / str(number))
        server.start()
        for index in order:
            assert server.accept(f"site-{index}", update(job, 0.1 * 3**index)) is None
        server.conclude()
        ends.append(server.state.shared)
    name = next(iter(job.initial))
    expected = job.initial[name] + (10 * 0.1 + 20 * 0.3 + 30 * 0.9) / 60
    assert torch.allclose(ends[0][name], expected, atol=1e-6)
    assert all(torch.equal(ends[0][n], end[n]) for end in ends for n in end)


def conclude(server: Coordinator, *values: float) -> None:
    """Carry out one phase in which each site's update is one of these numbers everywhere."""
    server.start()
    for index, value in enumerate(values):
        assert server.accept(f"site-{index}", update(server.job, value, server.state.round, server.state.phase)) is None
    server.conclude()


def test_bad_results_are_refused_with_a_reason_and_the_round_goes_on(small_job: MakeJob, tmp_path: Path) -> None:
    job = small_job("fedit")
    good = update(job, 0.1)
    name = next(iter(good.tensors))
    bad = {
        "NaN or Inf": replace(good, tensors=good.tensors | {name: good.tensors[name] * float("nan")}),
        "has shape": replace(good, tensors=good.tensors | {name: torch.zeros(1)}),
        "is missing": replace(good, tensors={n: t for n, t in good.tensors.items() if n != name}),
        "is not expected": replace(good, tensors=good.tensors | {"extra": torch.zeros(1)}),
        "stale": replace(good, round=7),
        "scalar 'secret' is not expected": replace(good, scalars={"secret": 1.0}),
        "over 100 times the adapter's": update(job, 0.1 * 1e6),
    }
    clean = coordinator(job, tmp_path / "clean")
    dirty = coordinator(job, tmp_path / "dirty", sites=len(bad) + 2)
    for server in (clean, dirty):
        server.start()
        for index in range(2):
            assert server.accept(f"site-{index}", good) is None
    for index, (reason, result) in enumerate(bad.items(), start=2):
        assert reason in dirty.accept(f"site-{index}", result)
    assert "has answered already" in dirty.accept("site-0", good)
    assert "was not asked" in dirty.accept("stranger", good)
    for server in (clean, dirty):
        server.conclude()
    assert all(torch.equal(clean.state.shared[n], t) for n, t in dirty.state.shared.items())
    log = (tmp_path / "dirty" / "metrics.jsonl").read_text()
    assert log.count('"event": "refused"') == len(bad) + 2


@pytest.mark.parametrize("private", [False, True])
def test_an_update_may_be_so_many_times_the_adapter_and_its_noise(private: bool, tmp_path: Path) -> None:
    """By hand: three times the initial adapter's norm; with noise, the clip 8 and a deviation of 0.1 * 8 a number are added."""
    raw = small_config("fedit").model_dump()
    raw["federation"]["max_norm_ratio"] = 3.0
    raw["privacy"] = {"unit": "site", "noise_multiplier": 0.1, "clip": 8.0, "trust": "local"} if private else None
    server = coordinator(assemble_job(JobConfig.model_validate(raw)), tmp_path)
    server.start()
    start = torch.cat([tensor.flatten() for tensor in server.job.initial.values()])
    root = len(start) ** 0.5
    most = 3 * (float(start.norm()) + (8 + 0.8 * root if private else 0))
    assert server.accept("site-0", update(server.job, 0.999 * most / root)) is None
    refusal = server.accept("site-1", update(server.job, 1.001 * most / root))
    assert "over 3 times the adapter's" in refusal
    assert ("noise of" in refusal) is private


def test_a_phase_that_begins_anew_counts_only_what_comes_then_and_has_room_for_it(tmp_path: Path) -> None:
    """By hand: (10 - 2 * 20) 1e4 / 30. Between a thousand sites these numbers would be too large to add up."""
    raw = small_config("fedit").model_dump()
    raw["federation"]["max_norm_ratio"] = 1e6
    server = coordinator(assemble_job(JobConfig.model_validate(raw)), tmp_path, sites=2)
    server.start()
    assert server.accept("site-0", update(server.job, 9e3)) is None
    conclude(server, 1e4, -2e4)
    assert all(torch.allclose(tensor, torch.full_like(tensor, -1e4), atol=1) for tensor in server.state.shared.values())


def test_hellos_at_the_same_time_agree_on_the_checkpoint(small_job: MakeJob, tmp_path: Path) -> None:
    """Both threads wait at the lock: the second must look at the checkpoint again that the first has brought."""
    server, refused = coordinator(small_job(), tmp_path, sites=0), list[str]()

    def welcome(name: str, checkpoint: str) -> None:
        try:
            server.welcome(Hello(name, 4, False, __version__, checkpoint))
        except RefusedError:
            refused.append(name)

    hellos = [threading.Thread(target=welcome, args=(name, name * 64)) for name in "ab"]
    with server._lock:
        for hello in hellos:
            hello.start()
        time.sleep(0.2)
    for hello in hellos:
        hello.join()
    assert (len(server.sites), len(refused)) == (1, 1)
    assert server.checkpoint == 64 * next(iter(server.sites))


def test_a_site_may_come_while_another_thread_goes_through_the_sites(small_job: MakeJob, tmp_path: Path) -> None:
    server = coordinator(small_job(), tmp_path)
    seen = iter(server.sites)
    next(seen)
    server.welcome(Hello("site-9", 4, False, __version__))
    assert list(seen) == ["site-1", "site-2"]
    assert "site-9" in server.trainers


def test_a_site_that_left_amid_its_round_is_asked_again_only_after_its_hello(small_job: MakeJob, tmp_path: Path) -> None:
    """Its former process has still answered. Its new process may have another version, which the hello tells."""
    server = coordinator(small_job(), tmp_path)
    server.start()
    server.forget_sites({"site-1", "site-7"})
    assert server.accept("site-1", update(server.job, 0.1)) is None
    assert server.accept("site-2", update(server.job, 0.1)) is None
    server.conclude()
    assert server.start().keys() == {"site-0", "site-2"}
    assert server.sites["site-2"].joined


def test_a_phase_of_named_sites_never_draws_others(small_job: MakeJob, tmp_path: Path) -> None:
    server = coordinator(small_job(), tmp_path)
    assert server.start(["site-7"]) == {}
    assert server.start([]) == {}


def test_a_share_of_the_sites_is_not_rounded_up_for_a_rounding_error(small_job: MakeJob, tmp_path: Path) -> None:
    """0.07 * 100 and 0.56 * 25 are over 7 and 14 as floating-point numbers; 0.05 of 93 sites are 4.65."""
    config = small_job().config
    for train, evaluate, counts in ((0.07, 0.0, (7, 0)), (0.75, 0.56, (75, 14)), (0.07, 0.05, (7, 5))):
        shares = {"fraction_train": train, "fraction_evaluate": evaluate}
        federation = config.federation.model_copy(update=shares)
        job = assemble_job(config.model_copy(update={"federation": federation}))
        server = coordinator(job, tmp_path / str(counts), sites=100)
        assert (len(server.start()), len(server.evaluation_payloads())) == counts


def test_a_folder_holds_one_run_and_one_process_works_on_it(small_job: MakeJob, tmp_path: Path) -> None:
    first = coordinator(small_job(), tmp_path)
    with pytest.raises(ConfigError, match="holds a run already"):
        coordinator(small_job(), tmp_path)
    with pytest.raises(ConfigError, match="going on in another process"):
        coordinator(small_job(), tmp_path, resume=True)
    first.close()
    assert coordinator(small_job(), tmp_path, resume=True).run == first.run  # before any round, too


def test_a_run_goes_on_after_a_torn_line(small_job: MakeJob, tmp_path: Path) -> None:
    coordinator(small_job(), tmp_path).close()
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"event": "resu')
    coordinator(small_job(), tmp_path, resume=True).start()
    assert [line["event"] for line in read_lines(path)[0] if line["event"] != "joined"][-2:] == ["resumed", "started"]


def test_all_sites_have_the_same_base_checkpoint(small_job: MakeJob, tmp_path: Path) -> None:
    one, other = "1" * 64, "2" * 64
    server = coordinator(small_job(), tmp_path / "first", sites=0)
    server.welcome(Hello("a", 5, False, __version__, one))
    with pytest.raises(RefusedError, match=f"b: its base checkpoint has sha256 {other}, the sites admitted .* have {one}"):
        server.welcome(Hello("b", 5, False, __version__, other))
    model = {"name": "sam", "variant": "vit_b", "checkpoint": "${SITE}/b.pth", "checkpoint_sha256": other, "image_size": 64}
    config = JobConfig.model_validate(small_config().model_dump() | {"model": model})
    named = coordinator(assemble_job(config), tmp_path / "named", sites=0)
    with pytest.raises(RefusedError, match=f"model.checkpoint_sha256 is {other}"):
        named.welcome(Hello("a", 5, False, __version__, one))
    named.welcome(Hello("b", 5, False, __version__, other))


def test_under_the_quorum_nothing_changes(small_job: MakeJob, tmp_path: Path) -> None:
    job = small_job("fedit")
    server = coordinator(job, tmp_path)
    server.start()
    server.accept("site-0", update(job, 1.0))
    with pytest.raises(ConsiliumError, match=r"1 of 3 .*federation\.min_sites is 2"):
        server.conclude()
    server.refuse("site-1", "no room", site_reason=Reason.LEDGER)
    with pytest.raises(ConsiliumError, match=f"1 site gave no result: site-1: {Reason.LEDGER.text}.*1 of 3 .*federation"):
        server.conclude()
    assert server.state.round == 0
    with pytest.raises(ConsiliumError, match="1 site is here"):
        coordinator(job, tmp_path / "few", sites=1).start()


def test_refusals_come_before_what_follows_from_them(small_job: MakeJob, tmp_path: Path) -> None:
    """Also of sites that may not join; a site that joined in the end has not refused. Sites with one reason stand together."""
    server = coordinator(small_job("fedit"), tmp_path, sites=1)
    for name in ("site-0", "b", "a"):
        server.refuse(name, "its own words", joining=True, site_reason=Reason.BUDGET)
    server.refuse("c", "another version", joining=True)
    with pytest.raises(ConsiliumError) as told:
        server.start()
    text = str(told.value)
    assert text.index("3 sites refused: ") < text.index(f"a, b: {Reason.BUDGET.text}") < text.index("1 site is here")
    assert "c: another version" in text
    assert "site-0" not in text
    assert "its own words" not in text
    assert "lower" not in text


@pytest.mark.parametrize(
    ("reasons", "match"),
    [
        ([Reason.TASK.text] * 2, "bring the newer checkpoint back, or begin a new run"),
        ([*[Reason.TASK.text] * 2, "left the federation"], "2 of 3 sites say `task`.*bring the newer checkpoint back"),
        ([Reason.TASK.text, Reason.DATA.text], "then resume the run"),
        ([Reason.LEDGER.text, Reason.DATA.text], "then resume the run"),
        ([Reason.LEDGER.text] * 2, "2 of 3 sites say `ledger`.*mend what their logs name; .*then begin a new run"),
        ([Reason.TASK.text, Reason.LEDGER.text], "`task`.*`ledger`.*bring the newer checkpoint back.*then begin a new run"),
    ],
)
def test_where_too_few_sites_are_not_ahead_of_the_checkpoint_nobody_is_told_to_resume(
    reasons: list[str], match: str, small_job: MakeJob, tmp_path: Path
) -> None:
    """Of three sites two must answer; a third that was dead, or had lost its state, had the other two resume for ever."""
    server = coordinator(small_job("fedit"), tmp_path)
    server.start()
    for number, reason in enumerate(reasons):
        server.refuse(f"site-{number}", reason)
        server.refuse(f"site-{number}", reason)  # a phase under masks asks a site several times
    server.refuse("late", Reason.JOB.text, joining=True)
    with pytest.raises(ConsiliumError, match=match):
        server.conclude()


def test_a_job_that_no_site_can_run_is_to_be_changed(small_job: MakeJob, tmp_path: Path) -> None:
    """Its own text in a simulation, the word in a federation."""
    for other, match in ((ConfigError, r"every refusal is `job`.*change the job"), (CheckpointError, "then resume the run")):
        server = coordinator(small_job("fedit"), tmp_path / other.__name__)
        server.start()
        server.refuse("site-0", Reason.JOB.text)
        broken = Mock(side_effect=other("model.dtype: this model casts numbers"))
        transport = LocalTransport(server, {"site-1": Mock(prepare_ask=Mock(return_value=broken))})
        transport.ask(Kind.TRAIN, {"site-1": server.sent["site-1"]}, Mock())
        with pytest.raises(ConsiliumError, match=match):
            server.conclude()


def test_who_may_not_take_part(small_job: MakeJob, tmp_path: Path) -> None:
    server = coordinator(small_job(), tmp_path, sites=0)
    with pytest.raises(RefusedError, match=r"consilium 0\.0\.0, the server has"):
        server.welcome(Hello("old", 5, False, "0.0.0"))
    with pytest.raises(RefusedError, match="no training samples"):
        server.welcome(Hello("empty", 0, False, __version__))
    with pytest.raises(RefusedError, match="training samples"):
        server.welcome(Hello("both", 5, False, __version__, test_only=True))


def test_who_only_tests_is_never_asked_to_train_and_makes_no_quorum(small_job: MakeJob, tmp_path: Path) -> None:
    server = coordinator(small_job("fedit"), tmp_path, sites=1)
    server.welcome(Hello("aside", 0, False, __version__, test_only=True))
    with pytest.raises(ConsiliumError, match=r"1 site .*federation\.min_sites is 2"):
        server.start()
    server.welcome(Hello("late", 5, False, __version__))
    assert server.start().keys() == {"site-0", "late"}
    assert server.evaluation_payloads() == {}
    assert server.start_final_evaluation().keys() == {"site-0", "late", "aside"}


def test_sampling_is_fixed_by_seed_and_round_not_by_registration_order(tmp_path: Path) -> None:
    config = small_config("fedit")
    federation = config.federation.model_copy(update={"fraction_train": 0.35})  # rounded up
    job = assemble_job(config.model_copy(update={"federation": federation}))
    cohorts = []
    for number, order in enumerate((range(10), reversed(range(10)))):
        server = Coordinator(job, tmp_path / str(number), lambda event: None)
        for index in order:
            server.welcome(Hello(f"site-{index}", 1, False, __version__))
        rounds = []
        for round in range(4):
            server.state = replace(server.state, round=round)
            rounds.append(sorted(server.start()))
        cohorts.append(rounds)
    assert cohorts[0] == cohorts[1]
    assert all(len(c) == 4 for c in cohorts[0])
    assert len({tuple(c) for c in cohorts[0]}) > 1


def with_held_out(folder: Path) -> Coordinator:
    config = small_config("deer")
    federation = config.federation.model_copy(update={"fraction_train": 0.2, "fraction_evaluate": 0.3})
    return coordinator(assemble_job(config.model_copy(update={"federation": federation})), folder, sites=6)


def test_sites_that_do_not_train_are_held_out_by_the_share_of_the_job(tmp_path: Path) -> None:
    """Of six that train two are asked; of the other four 0.3, rounded up, are two. A site that only tests is none of them."""
    server = with_held_out(tmp_path)
    server.welcome(Hello("aside", 0, False, __version__, test_only=True))
    drawn = []
    for round in range(8):
        server.state = replace(server.state, round=round, phase=0)
        asked, found = server.start().keys(), server.evaluation_payloads()
        assert (len(asked), len(found)) == (2, 2)
        assert found.keys() < server.trainers.keys() - asked
        assert {(payload.round, payload.phase) for payload in found.values()} == {(round, HELD_OUT)}
        drawn.append((*sorted(asked), *found))
        server.state = replace(server.state, phase=1)
        assert server.evaluation_payloads() == {}  # once a round
    assert len(set(drawn)) > 1


def test_the_run_log_keeps_the_scores_of_held_out_sites(tmp_path: Path) -> None:
    server = with_held_out(tmp_path)
    server.start()
    name = next(iter(server.evaluation_payloads()))
    assert server.accept_held_out(name, Payload(0, HELD_OUT, {}, metrics={"validation/global/dice": 0.625})) is None
    server.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["site"] for row in rows if 0.625 in row.get("metrics", {}).values()] == [name]


def test_a_checkpoint_restores_state_and_run(small_job: MakeJob, tmp_path: Path) -> None:
    job = small_job()
    server = coordinator(job, tmp_path)
    conclude(server, 0.25, 0.25, 0.25)
    server.close()
    again = Coordinator(job, tmp_path, lambda event: None, resume=True)
    again.close()
    assert (again.run, again.state.round) == (server.run, 1)
    assert all(torch.equal(again.state.shared[n], t) for n, t in server.state.shared.items())
    with pytest.raises(CheckpointError, match="is of another job"):
        Coordinator(assemble_job(small_config("fedit")), tmp_path, lambda event: None, resume=True)


def test_local_only_concludes_without_tensors(small_job: MakeJob, tmp_path: Path) -> None:
    server = coordinator(small_job("local_only"), tmp_path)
    server.start()
    for index in range(2):
        assert server.accept(f"site-{index}", Payload(0, 0, {})) is None
    server.conclude()
    assert server.state.round == 1


def central(tmp_path: Path, sites: int = 4, strategy: str = "fedit", **privacy: object) -> Coordinator:
    raw = small_config(strategy, rounds=40).model_dump()
    raw["privacy"] = {"unit": "site", "noise_multiplier": 2.0, "clip": 0.5, "trust": "central"} | privacy
    return coordinator(assemble_job(JobConfig.model_validate(raw)), tmp_path, sites)


def test_central_noise_is_added_once_over_the_number_of_sites(tmp_path: Path) -> None:
    """PITFALL: dividing by K twice, adding sigma C / sqrt K after averaging, or counting the site of five that is absent."""
    server = central(tmp_path, sites=5)
    conclude(server, 0.0, 0.1, 0.2, 0.3)
    shared, initial = server.state.shared, server.job.initial
    moved = torch.cat([(shared[name].double() - initial[name].double()).flatten() for name in shared])
    assert moved.numel() > 1000
    assert float(moved.std()) == pytest.approx(2.0 * 0.5 / 4, rel=0.08)


def test_central_noise_is_on_the_sum_of_updates_clipped_in_integers_by_the_server(tmp_path: Path) -> None:
    """By hand, without noise: an update of norm 0.4 stays, one of 5 is cut to the clip 0.5, whatever the site says."""
    server = central(tmp_path, noise_multiplier=0.0)
    numbers = sum(tensor.numel() for tensor in server.job.initial.values())
    conclude(server, *(norm / numbers**0.5 for norm in (0.4, 0.4, 5.0, 5.0)))
    for name, tensor in server.state.shared.items():
        expected = server.job.initial[name].double() + (0.4 + 0.4 + 0.5 + 0.5) / 4 / numbers**0.5
        assert torch.allclose(tensor.double(), expected, atol=1e-6)


def test_weights_are_uniform_under_site_level_privacy(tmp_path: Path) -> None:
    server = central(tmp_path, noise_multiplier=0.0, clip=1e6)
    server.sites = {name: replace(site, num_samples=10**index) for index, (name, site) in enumerate(server.sites.items())}
    conclude(server, 0.0, 1.0, 2.0, 3.0)
    name = next(iter(server.job.initial))
    assert torch.allclose(server.state.shared[name], server.job.initial[name] + 1.5, atol=1e-6)


def test_the_log_tells_the_epsilon_of_the_plan_so_far(tmp_path: Path) -> None:
    """After each of DEeR's two phases a round: one release more."""
    server = central(tmp_path, strategy="deer")
    for place in ((0, 0), (0, 1), (1, 0), (1, 1)):
        assert (server.state.round, server.state.phase) == place
        conclude(server, 0.1, 0.1, 0.1, 0.1)
    server.finish()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    told = [line["privacy/epsilon"] for line in lines if line["event"] == "concluded"]
    assert told == pytest.approx([server.plan.epsilon(count) for count in (1, 2, 3, 4)])
    report = json.loads((tmp_path / "privacy.json").read_text())
    assert report["releases"] == 80
    assert "trust central" in report["claim"]


WRONG_MERGES: dict[str, Callable[[ServerState], object]] = {
    "returned NoneType; return the next ServerState": lambda state: None,
    r"stays in round 0; build on super\(\)\.aggregate": lambda state: replace(state, round=0),
    "lost tensor 'a'": lambda state: replace(state, shared={}),
    r"returned 'a' with shape \(6,\), expected \(2, 3\)": lambda state: replace(state, shared={"a": torch.zeros(6)}),
    "put 'steps' into optimizer, which is not a tensor": lambda state: replace(state, optimizer={"steps": 3}),
}


@pytest.mark.parametrize("strategy", [FedIT(), LoraFair()])  # one needs sums, the other each site's update
@pytest.mark.parametrize("message", WRONG_MERGES)
def test_a_merge_that_returns_no_next_state_is_one_line(message: str, strategy: Strategy) -> None:
    before = ServerState(0, 0, {"a": torch.zeros(2, 3)}, {})
    after = replace(before, round=1)
    check_next_state(strategy, ("a",), before, after)
    with pytest.raises(ConsiliumError, match=rf"strategy '{strategy.name}': aggregate\(\) {message}"):
        check_next_state(strategy, ("a",), before, WRONG_MERGES[message](after))


def test_why_results_do_not_merge_is_said(small_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FedIT, "aggregate", lambda self, state, results: torch.zeros(2) + torch.zeros(3))
    with pytest.raises(ConsiliumError, match=r"RuntimeError: The size of tensor a \(2\)"):
        conclude(coordinator(small_job("fedit"), tmp_path), 1.0, 1.0, 1.0)


def test_the_record_says_how_many_parameters_travel_and_stay_and_who_only_tests(tmp_path: Path) -> None:
    """FedSA shares A and keeps B: the numbers are the tensors' own."""
    job = assemble_job(small_config("fedsa_lora"))
    events = list[Mapping[str, object]]()
    server = Coordinator(job, tmp_path, events.append)
    server.welcome(Hello("a", 10, False, __version__))
    server.welcome(Hello("etis", 0, False, __version__, test_only=True))
    server.close()
    assert [(event["site"], event["num_samples"]) for event in events if event["event"] == "site"] == [("a", 10), ("etis", 0)]
    lines, _ = read_lines(tmp_path / "metrics.jsonl")
    told = next(line for line in lines if line["event"] == "parameters")
    sizes = {end: sum(t.numel() for n, t in job.initial.items() if n.endswith(end)) for end in ("lora_A", "lora_B")}
    assert (told["shared"], told["local"], told["frozen"]) == (sizes["lora_A"], sizes["lora_B"], 0)
    assert [line["site"] for line in lines if line["event"] == "joined" and line.get("test_only")] == ["etis"]
    assert read_run(tmp_path).test_only == {"etis"}
