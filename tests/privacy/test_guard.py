"""What may leave a site, and in what state."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event
from unittest.mock import patch

import pytest
import torch

from consilium.client.build import build_guard
from consilium.config.job import JobConfig
from consilium.config.privacy import HospitalPrivacyPolicy
from consilium.config.site import SiteConfig
from consilium.core.errors import Reason, RefusedError
from consilium.core.messages import Kind, Payload, SiteInfo, Tensors, allowed_metrics
from consilium.federation.job_assembly import Job
from consilium.privacy import audit_log
from consilium.privacy.accounting import epsilon_for
from consilium.privacy.guard.guard import Guard
from consilium.privacy.guard.release import check_upload, upload_shapes
from consilium.privacy.guard.task_schedule import AuthorizedTask
from consilium.strategies.fediat import FedIAT
from tests.conftest import assembled, small_config

SHARED, LOCAL = "image_encoder.blocks.0.attn.qkv.lora_B", "image_encoder.blocks.0.attn.qkv.lora_A"
METRICS = allowed_metrics(frozenset({"dice"}))
PRIVACY = {"unit": "site", "epsilon": 3, "clip": 0.5}
Make = Callable[..., Guard]


def test_only_shared_tensors_and_declared_metrics_leave_without_noise() -> None:
    check_upload(Payload(0, 0, {SHARED: torch.zeros(2)}, {}, {"validation/global/dice": 0.5}), FedIAT(), METRICS)
    for payload, why in (
        (Payload(0, 0, {LOCAL: torch.zeros(2)}), "is local, only shared tensors may leave"),
        (Payload(0, 0, {SHARED: torch.tensor([float("nan")])}), "NaN or Inf"),
        (Payload(0, 0, {}, {"patients": 3.0}), "scalar 'patients' may not leave"),
        (Payload(0, 0, {}, {}, {"validation/global/names": 3.0}), "names' is not declared"),
    ):
        with pytest.raises(RefusedError, match=why):
            check_upload(payload, FedIAT(), METRICS)


def private_job(
    strategy: str | dict = "deer", privacy: dict | None = PRIVACY, diagnostics: dict | None = None, **federation: object
) -> Job:
    raw = small_config(strategy).model_dump() | {"privacy": privacy, "diagnostics": diagnostics or {}}
    raw["federation"] |= federation
    return assembled(JobConfig.model_validate(raw))


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def make(job: Job, **policy: object) -> Guard:
        site = SiteConfig(privacy=HospitalPrivacyPolicy.model_validate({"dataset": "ward-7", **policy}))
        return build_guard(job, "site-1", site, tmp_path, tmp_path, events.append)

    events: list = []
    make.events = events
    return make


def broadcast(job: Job, round: int = 0, phase: int = 0) -> Payload:
    state = replace(job.strategy.initialize(job.initial), round=round, phase=phase)
    return job.strategy.payload(state, SiteInfo("site-1", 1))


def result(job: Job, round: int = 0, phase: int = 0, value: float = 1.0) -> Payload:
    shapes = upload_shapes(job.strategy, broadcast(job, round, phase))
    return Payload(round, phase, {n: torch.full(shape, value) for n, shape in shapes.items()}, {}, {"train/loss": 0.5})


def ask(guard: Guard, job: Job, round: int = 0, phase: int = 0, run: str = "r") -> AuthorizedTask:
    return guard.authorize(Kind.TRAIN, run, broadcast(job, round, phase))


def train(guard: Guard, run: str, sent: Payload, update: Payload) -> Payload:
    return guard.release(guard.authorize(Kind.TRAIN, run, sent), update)


def effective_norm(job: Job, update: Tensors) -> float:
    scale = job.config.adapter.alpha / job.config.adapter.rank
    products = [scale * u.double() @ job.initial[n[:-1] + "A"].double() for n, u in update.items()]
    return sum(float(p.square().sum()) for p in products) ** 0.5


@pytest.mark.parametrize("privacy", [{"unit": "site", "noise_multiplier": 0, "clip": 0.5}, PRIVACY | {"trust": "central"}])
def test_without_noise_of_its_own_a_site_sends_the_update_clipped_in_the_products_space(privacy: dict, make: Make) -> None:
    """With trust central the server adds the noise. Asking some sites only makes a release no cheaper."""
    job = private_job(privacy=privacy, fraction_train=0.5)
    guard = make(job)
    released = train(guard, "r", broadcast(job), result(job))
    assert effective_norm(job, released.tensors) == pytest.approx(0.5, rel=1e-4)
    assert released.metrics == {}  # nothing protects a score
    (row,) = guard.ledger.entries()
    assert (row.sample_rate, row.count) == (1.0, 1)


def test_a_release_adds_the_planned_noise_tells_the_site_and_writes_the_ledger(make: Make) -> None:
    job = private_job()
    guard = make(job)
    released = train(guard, "r", broadcast(job), result(job, value=0.0))
    (row,) = guard.ledger.entries()
    assert (row.round, row.phase, row.unit, row.noise_multiplier) == (0, 0, "site", guard.plan.noise_multiplier)
    (event,) = json.loads(json.dumps(make.events))  # plain values
    assert event["event"] == "release"
    assert event["noise"] == pytest.approx(effective_norm(job, released.tensors), rel=1e-3)
    assert event["noise_std"] == pytest.approx(guard.plan.noise_multiplier * 0.5)
    assert event["noise"] == pytest.approx(event["noise_std"] * event["dimensions"] ** 0.5, rel=0.1)


def test_the_noise_of_a_round_with_a_rank_of_its_own_is_measured_at_its_scale(make: Make, tmp_path: Path) -> None:
    """An update of zeros leaves as the noise alone. DP-DyLoRA's rank 2 trains at alpha / 2 = 2, not at alpha / r = 1."""
    job = private_job({"name": "dp_dylora", "seed": 0}, diagnostics={"noise": True})
    sent = broadcast(job)
    noise = train(make(job), "r", sent, result(job, value=0.0)).tensors
    factors = {name: (sent.tensors[f"{name[:-1]}A"], noise[name]) for name in noise if name.endswith("lora_B")}
    assert {len(a) for a, _ in factors.values()} == {2}
    expected = sum(float((2 * xi.double() @ a.double()).square().sum()) for a, xi in factors.values()) ** 0.5
    (measured,) = json.loads(next(tmp_path.rglob("noise.json")).read_text()).values()
    assert measured == pytest.approx({"noise/xi_B A": expected, "noise/B xi_A": 0.0})


def test_a_replay_gets_the_same_bytes_in_a_new_process_and_spends_nothing(make: Make) -> None:
    job = private_job()
    first = make(job)
    sent = train(first, "r", broadcast(job), result(job)).tensors
    for update in (result(job), result(job, value=7.0)):  # whatever the executor says this time
        other = make(job)
        again = train(other, "r", broadcast(job), update).tensors
        assert all(torch.equal(again[n], t) for n, t in sent.items())
    assert len(first.ledger.entries()) == 1


def test_a_task_is_answered_once_and_only_as_it_was_authorized(make: Make) -> None:
    job = private_job()
    guard = make(job)
    first, second = ask(guard, job), ask(guard, job)  # the newer one ends the older
    stranger = AuthorizedTask(Kind.TRAIN, second.run, second.payload)
    for task in (first, stranger):
        with pytest.raises(RefusedError, match="not authorized"):
            guard.release(task, result(job))
    third = ask(guard, job)
    guard.release(third, result(job))
    with pytest.raises(RefusedError, match="not authorized"):
        guard.release(third, result(job))
    with pytest.raises(RefusedError, match="not authorized"):
        guard.release_scores(ask(guard, job), Payload(2, 0, {}))
    assert len(guard.ledger.entries()) == 1


def test_a_refusal_after_an_answer_is_no_second_answer(make: Make) -> None:
    """Trouble that comes when the answer has left is a word about no task: it must not repeat the answer, nor cost."""
    job = private_job()
    guard = make(job)
    guard.release(ask(guard, job), result(job))
    assert guard.refuse(Reason.TRAINING) is Reason.TRAINING
    guard.release_scores(guard.authorize(Kind.EVALUATE, "r", Payload(2, 0, {})), Payload(2, 0, {}))
    assert guard.refuse(Reason.TRAINING) is Reason.TRAINING
    assert len(guard.ledger.entries()) == 1


def test_a_refusal_after_another_message_is_no_answer_to_the_task_before(make: Make) -> None:
    """A message that names no round of the job ends the task. Its failure must not stay as the answer of the round before."""
    job = private_job()
    guard = make(job)
    ask(guard, job)
    with pytest.raises(RefusedError, match="no task train in round"):
        ask(guard, job, round=2)
    assert guard.refuse(Reason.TRAINING) is Reason.TRAINING
    assert [row.count for row in guard.ledger.entries() if row.count] == []
    train(guard, "r", broadcast(job), result(job))
    assert [row.count for row in guard.ledger.entries() if row.count] == [1]


@pytest.mark.parametrize("unit", ["site", "record"])
def test_what_was_trained_beside_a_word_of_another_process_is_not_sent_and_bars_nobody(
    unit: str, make: Make, tmp_path: Path
) -> None:
    """The word of one of two processes is paid with the row that the other one meant to pay with, and then removed.

    The refusal that follows is on record, though an equal one was there before.
    """
    job = private_job("fedit", {"unit": unit, "noise_multiplier": 2.0, "clip": 1.0})
    one, other = make(job), make(job)
    ask(one, job)
    one.end_task()
    assert one.refuse(Reason.LEDGER) is Reason.LEDGER
    task, _ = ask(one, job), ask(other, job)
    other.refuse(Reason.TRAINING)
    (word,) = tmp_path.rglob("refused/*.json")
    word.unlink()
    with pytest.raises(RefusedError, match="nothing was sent"):
        one.release(task, result(job))
    assert one.refuse(Reason.TRAINING) is Reason.LEDGER
    (record,) = tmp_path.rglob(audit_log.FILE)
    assert [line["reason"] for line in audit_log.lines(record) if line["kind"] == "refusal"] == ["ledger", "training", "ledger"]
    train(make(job), "r", broadcast(job), result(job))
    assert sum(row.count > 0 for row in one.ledger.entries()) == 2


def test_a_word_that_a_former_version_has_paid_meanwhile_pays_for_no_release(make: Make) -> None:
    """Its row has no digest: it is none of a release, and what is trained beside it has no row of its own."""
    job = private_job()
    guard = make(job)
    train(guard, "other", broadcast(job), result(job))
    (row,) = guard.ledger.entries()
    task = ask(guard, job)
    guard.ledger.charge_once(replace(row, run=task.run, digest=""), {})
    with pytest.raises(RefusedError, match="nothing was sent"):
        guard.release(task, result(job))
    train(make(job), "r", broadcast(job), result(job))
    assert [bool(row.digest) for row in guard.ledger.entries()] == [True, False, True]


def test_a_crash_before_the_ledger_costs_nothing_and_one_after_it_sends_the_same(make: Make) -> None:
    job = private_job()
    guard = make(job)
    task = ask(guard, job)
    with patch.object(type(guard.ledger), "charge_once", side_effect=OSError("power")), pytest.raises(OSError, match="power"):
        guard.release(task, result(job))
    assert guard.ledger.entries() == []
    after = make(job)
    assert train(after, "r", broadcast(job), result(job)).tensors
    assert len(after.ledger.entries()) == 1


def test_bytes_that_are_lost_after_a_release_are_not_made_anew(make: Make, tmp_path: Path) -> None:
    """New noise on the same update would be a second release at the price of one."""
    job = private_job()
    guard = make(job)
    train(guard, "r", broadcast(job), result(job))
    (released,) = tmp_path.rglob("released.safetensors")
    released.unlink()
    with pytest.raises(RefusedError, match="bytes are lost"):
        train(guard, "r", broadcast(job), result(job))
    released.write_bytes(b"x")
    with pytest.raises(RefusedError, match=r"released\.safetensors: cannot be read.*restore it") as error:
        train(guard, "r", broadcast(job), result(job))
    assert error.value.reason is Reason.LEDGER


def test_a_word_costs_a_release_and_what_is_tried_after_it_another(make: Make, tmp_path: Path) -> None:
    """As where the administrator has removed the word: both were seen, and the release's own bytes are known again."""
    job = private_job()
    ask(guard := make(job), job)
    guard.refuse(Reason.TRAINING)
    assert [row.count for row in guard.ledger.entries()] == [1]
    for words in (1, 2):
        with pytest.raises(RefusedError, match="failed here before"):
            ask(make(job), job)
        (word,) = tmp_path.rglob("refused/*.json")
        word.unlink()
        if words == 1:
            ask(again := make(job), job)
            again.refuse(Reason.TRAINING)
    train(make(job), "r", broadcast(job), result(job))
    rows = guard.ledger.entries()
    assert [(row.count, row.digest == "word") for row in rows] == [(1, True), (1, True), (1, False)]
    (record,) = tmp_path.rglob(audit_log.FILE)
    told = [m["privacy"]["epsilon"] for m in audit_log.read_with_epsilon(record)["messages"] if "privacy" in m]
    assert told == pytest.approx([epsilon_for("site", rows[:n], 1e-5) for n in (1, 2, 3)])  # the page counts words too
    (released,) = tmp_path.rglob("released.safetensors")
    released.unlink()
    with pytest.raises(RefusedError, match="bytes are lost"):
        train(make(job), "r", broadcast(job), result(job))


def test_a_word_whose_payment_broke_off_is_paid_when_it_is_asked_for_again(make: Make) -> None:
    job = private_job()
    ask(guard := make(job), job)
    with patch.object(type(guard.ledger), "charge_once", side_effect=OSError("power")), pytest.raises(OSError, match="power"):
        guard.refuse(Reason.TRAINING)
    for _ in range(2):
        with pytest.raises(RefusedError, match="has failed here before") as refused:
            ask(make(job), job)
        assert refused.value.reason is Reason.TRAINING
    assert [row.count for row in guard.ledger.entries()] == [1]


def test_a_site_has_joined_a_run_in_which_it_has_paid_for_a_release(make: Make) -> None:
    """Other runs of the same data, and a word in place of a release, are none."""
    job = private_job()
    hello = {"joined": True, "version": "1", "checkpoint": "", "capacity": {}, "libraries": {}}

    def joined(run: str) -> bool:
        guard = make(job)
        return bool(guard.release_hello(guard.authorize(Kind.HELLO, run), hello)["joined"])

    assert not joined("one")
    for run in ("one", "two"):
        train(make(job), run, broadcast(job), result(job))
    ask(guard := make(job), job, run="three")
    guard.refuse(Reason.TRAINING)
    assert [joined(run) for run in ("one", "two", "three", "four")] == [True, True, False, False]


def test_in_steps_what_is_trained_after_a_word_costs_again(make: Make, tmp_path: Path) -> None:
    """Fresh coins and fresh noise on the same data are another release, also where the first training ended in a word."""
    job = private_job("fedit", {"unit": "record", "noise_multiplier": 2.0, "clip": 1.0})
    ask(guard := make(job), job)
    ask(make(job), job)  # a site that crashed in training and left nothing pays once
    guard = make(job)
    ask(guard, job)
    guard.refuse(Reason.TRAINING)
    assert sum(row.count > 0 for row in guard.ledger.entries()) == 1
    for word in tmp_path.rglob("refused/*.json"):
        word.unlink()
    train(make(job), "r", broadcast(job), result(job))
    train(make(job), "r", broadcast(job), result(job))  # the same bytes again
    rows = guard.ledger.entries()
    assert sum(row.count > 0 for row in rows) == 2
    (record,) = tmp_path.rglob(audit_log.FILE)
    told = [m["privacy"]["epsilon"] for m in audit_log.read_with_epsilon(record)["messages"] if "privacy" in m]
    assert told[-1] == pytest.approx(epsilon_for("record", rows, 1e-5))


def test_a_word_of_a_former_version_is_a_word(make: Make) -> None:
    """Its row at site level has no digest and the run's plain name: what is tried after it costs, and is sent."""
    job = private_job()
    guard = make(job)
    task = ask(guard, job)
    guard.ledger.charge_once(guard.replay.charges.row(task.run, (0, 0)), {})
    train(make(job), "r", broadcast(job), result(job))
    assert [row.count for row in guard.ledger.entries()] == [1, 1]


def test_a_budget_for_a_job_s_releases_holds_with_a_word_among_them_and_without_room_for_another_try(
    make: Make, tmp_path: Path
) -> None:
    job = private_job()
    plan = make(job).plan
    assert plan is not None
    budgets = {"site": {"epsilon": plan.epsilon(), "delta": plan.config.delta}}
    ask(guard := make(job, budgets=budgets), job)
    guard.refuse(Reason.TRAINING)
    ask(make(job, budgets=budgets), job, phase=1)  # as of a site that was started anew: the rest of the job goes on
    for word in tmp_path.rglob("refused/*.json"):
        word.unlink()
    with pytest.raises(RefusedError, match="privacy budget"):
        ask(make(job, budgets=budgets), job)


def test_a_tampered_result_sends_nothing_and_spends_nothing(make: Make) -> None:
    job = private_job()
    guard, good = make(job), result(job)
    name = next(iter(good.tensors))
    peer = name[:-1] + "A"
    for payload, reason in (
        (replace(good, tensors=good.tensors | {peer: job.initial[peer]}), "is frozen, only shared"),
        (replace(good, tensors=good.tensors | {"patients": torch.ones(3)}), "none of the adapter"),
        (replace(good, tensors={n: t for n, t in good.tensors.items() if n != name}), "has shape None"),
        (replace(good, tensors=good.tensors | {name: torch.ones(1, 1)}), "has shape \\(1, 1\\)"),
        (result(job, value=float("nan")), "NaN or Inf"),
        (replace(good, scalars={"gate": 1.0}), "scalar 'gate'"),
        (replace(good, metrics={"age": 50.0}), "metric 'age'"),
        (replace(good, round=1), "nobody asked for"),
        (replace(result(job, 0, 1), phase=1), "nobody asked for"),
    ):
        task = ask(guard, job)
        with pytest.raises(RefusedError, match=reason):
            guard.release(task, payload)
        assert guard.ledger.entries() == []


def test_a_peer_the_server_did_not_send_or_broke_sends_nothing(make: Make) -> None:
    job = private_job()
    guard = make(job)
    peer = next(n for n in job.initial if n.endswith("lora_A"))
    sent = broadcast(job)
    for tensors in (
        {n: t for n, t in sent.tensors.items() if n != peer},
        sent.tensors | {peer: job.initial[peer] * float("nan")},
    ):
        with pytest.raises(RefusedError, match="public peer"):
            train(guard, "r", replace(sent, tensors=tensors), result(job))


def test_a_server_cannot_have_a_release_for_nothing_by_replaying_it_with_zero_peers(make: Make) -> None:
    job = private_job()
    guard = make(job)
    task = ask(guard, job)
    with patch.object(type(guard.ledger), "charge_once", side_effect=RefusedError("budget")), pytest.raises(RefusedError):
        guard.release(task, result(job))  # prepared, kept, not paid for
    zeros = {name: torch.zeros_like(t) for name, t in job.initial.items()}
    train(guard, "r", replace(broadcast(job), tensors=zeros), result(job))
    assert len(guard.ledger.entries()) == 1


def test_a_plan_over_the_budget_is_refused_before_training_with_the_numbers(make: Make) -> None:
    job = private_job()
    with pytest.raises(RefusedError, match=r"'ward-7'.* epsilon 0 of 1 .* 3"):
        make(job, budgets={"site": {"epsilon": 1}}).authorize(Kind.HELLO, "r")
    make(job, budgets={"site": {"epsilon": 3.01}}).authorize(Kind.HELLO, "r")


def test_two_jobs_share_one_budget(make: Make) -> None:
    job, budget = private_job(), {"site": {"epsilon": 4}}
    guard = make(job, budgets=budget)
    guard.authorize(Kind.HELLO, "one")
    for round in range(2):
        for phase in range(2):
            sent = replace(broadcast(job, round, phase), tensors={n: torch.ones_like(t) for n, t in job.initial.items()})
            train(guard, "one", sent, result(job, round, phase))
    with pytest.raises(RefusedError, match="has spent epsilon 3 of 4"):
        make(job, budgets=budget).authorize(Kind.HELLO, "two")
    with pytest.raises(RefusedError, match="has spent epsilon 3 of 4"):
        ask(make(job, budgets=budget), job, run="two")  # a server that skips the hello


@pytest.mark.parametrize(
    ("privacy", "policy", "reason"),
    [
        (None, {"budgets": {"site": {"epsilon": 3}}}, "the job no `privacy:`"),
        (None, {"trust": ["local"]}, "the job no `privacy:`"),
        (PRIVACY, {"budgets": {"record": {"epsilon": 3}}}, "one record of data set 'ward-7' .* would be 6"),
        (PRIVACY | {"trust": "central"}, {"trust": ["local"]}, "'central' is not in site.yaml's"),
        (PRIVACY | {"trust": "central"}, {"budgets": {"site": {"epsilon": 3}}}, "'central' is not in site.yaml's"),
        (PRIVACY, {"trust": []}, "'local' is not in site.yaml's"),
        (
            PRIVACY | {"noise_multiplier": 0, "epsilon": None},
            {"budgets": {"site": {"epsilon": 3}}},
            "a noise multiplier of 0 is none",
        ),
        (PRIVACY | {"noise_multiplier": 0, "epsilon": None}, {"trust": ["local"]}, "a noise multiplier of 0 is none"),
    ],
)
def test_a_sites_policy_wins_over_the_job(privacy: dict | None, policy: dict, reason: str, make: Make) -> None:
    job = private_job(privacy=privacy)
    with pytest.raises(RefusedError, match=reason):
        make(job, **policy).authorize(Kind.HELLO, "r")
    with pytest.raises(RefusedError, match=reason):
        ask(make(job, **policy), job)


@pytest.mark.parametrize(
    ("privacy", "masks", "shown"),
    [(None, False, 4), (None, True, 4), ("site", False, 1), ("site", True, 1), ("record", False, 4), ("record", True, 1)],
)
def test_the_sample_count_is_hidden_by_site_level_privacy_and_by_masks_of_a_private_job(
    privacy: str | None, masks: bool, shown: int, make: Make
) -> None:
    raw = small_config("fedit").model_dump() | {"privacy": {"unit": privacy, "epsilon": 5, "clip": 0.5} if privacy else None}
    job = assembled(JobConfig.model_validate(raw | ({"secure_aggregation": {}} if masks else {})))
    assert make(job).shown_samples == shown


def test_seeded_noise_repeats_and_the_ledger_calls_it_not_private(make: Make, tmp_path: Path) -> None:
    job, found = private_job(), []
    for run in ("one", "two"):
        guard = make(job, noise_seed=5)
        found.append(train(guard, run, broadcast(job), result(job)).tensors)
    assert all(torch.equal(found[0][n], t) for n, t in found[1].items())
    assert [row.private for row in guard.ledger.entries()] == [False, False]
    system = make(job)
    third = train(system, "three", broadcast(job), result(job)).tensors
    records = {record.parent.name.partition(".")[0]: audit_log.lines(record) for record in tmp_path.rglob(audit_log.FILE)}
    told = {run: ["seeded" in line["privacy"] for line in lines if "privacy" in line] for run, lines in records.items()}
    assert told == {"one": [True], "two": [True], "three": [False]}
    assert not any(torch.equal(third[n], t) for n, t in found[0].items())


def test_record_level_is_charged_when_the_task_comes(make: Make) -> None:
    raw = small_config("fedit").model_dump() | {"privacy": {"unit": "record", "epsilon": 5}}
    job = assembled(JobConfig.model_validate(raw))
    guard = make(job, budgets={"record": {"epsilon": 6}})
    task = ask(guard, job)
    (row,) = guard.ledger.entries()
    assert (row.unit, row.adjacency, row.count, row.sample_rate) == ("record", "zero-out", 2, 0.5)
    sent = guard.release(task, result(job))
    assert sent.tensors.keys() == result(job).tensors.keys()
    again = train(make(job, budgets={"record": {"epsilon": 6}}), "r", broadcast(job), result(job, value=7.0))
    assert all(torch.equal(again.tensors[n], t) for n, t in sent.tensors.items())
    assert [row.count for row in guard.ledger.entries()] == [2, 0]  # the cost, and what was released for it
    assert guard.shown_samples == 4


def test_an_evaluation_carries_metrics_only_and_only_if_the_site_shares_them(make: Make) -> None:
    job = private_job(privacy=None)
    guard = make(job)
    scores = {"test/global/dice": 0.5}

    def report(guard: Guard, answer: Payload) -> Payload:
        return guard.release_scores(guard.authorize(Kind.EVALUATE, "r", Payload(2, 0, {})), answer)

    assert report(guard, Payload(2, 0, {}, {"gate": 0.5}, scores)) == Payload(2, 0, {}, {}, scores)
    with pytest.raises(RefusedError, match="an evaluation with tensors"):
        report(guard, Payload(2, 0, {SHARED: torch.zeros(1)}))
    assert report(make(private_job()), Payload(2, 0, {}, {}, scores)).metrics == {}


def test_a_process_waits_while_another_one_makes_the_release(make: Make) -> None:
    """The first has drawn its noise and not stored it yet when the second one answers."""
    job = private_job()
    first, second = make(job), make(job)
    tasks = [ask(guard, job) for guard in (first, second)]
    drawn, answered = Event(), Event()

    def hold(event: object) -> None:
        drawn.set()
        answered.wait(1.0)  # the second one waits for the first, so that this runs out

    first.observer = hold
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first.release, tasks[0], result(job))
        assert drawn.wait(30.0)
        other = second.release(tasks[1], result(job))
        answered.set()
        one = waiting.result()
    assert all(torch.equal(one.tensors[n], t) for n, t in other.tensors.items())
    assert len(first.ledger.entries()) == 1


def test_a_first_phase_a_with_b_zero_releases_zeros_and_costs_what_any_does(make: Make) -> None:
    """PITFALL: B = 0 has no inverse; nothing of the update shows, but that there is one does, and for nothing it is no more."""
    job = private_job()
    guard = make(job)
    released = train(guard, "r", broadcast(job, 0, 1), result(job, 0, 1))
    assert all(t.abs().max() == 0 for t in released.tensors.values())
    assert [(row.round, row.phase, row.count) for row in guard.ledger.entries()] == [(0, 1, 1)]
