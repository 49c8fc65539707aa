"""A server that asks for what the job does not: nothing runs, nothing is charged, nothing leaves but a word."""

import pytest
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import Shareable

from consilium.core.errors import Reason
from consilium.core.messages import HELD_OUT, Kind, Payload
from consilium.flare.job import wire
from consilium.privacy import audit_log
from tests.adversary.server.conftest import RECORD_LEVEL, SITE_LEVEL, Client, MakeClient


def refused(client: Client, answer: Shareable, reason: Reason = Reason.TASK) -> bool:
    return wire.reason_of(answer) is reason and not client.trainer.did and not client.guard.ledger.entries()


@pytest.mark.parametrize("privacy", [None, SITE_LEVEL, RECORD_LEVEL])
@pytest.mark.parametrize("place", [(-5, -1), (50, 0), (2, 0), (0, 1), (0, HELD_OUT), (-1, -1), (2**40, 0)])
def test_training_outside_the_job_never_reaches_the_data(
    place: tuple[int, int], privacy: dict | None, client: MakeClient
) -> None:
    """A train task in the guise of an evaluation trained by DP-SGD and kept local factors, with the ledger empty."""
    site = client(privacy)
    assert refused(site, site.ask("train", site.task(*place)))


@pytest.mark.parametrize("place", [(0, 0), (1, 0), (3, 0), (2, 1), (-1, HELD_OUT)])
def test_an_evaluation_where_the_job_has_none(place: tuple[int, int], client: MakeClient) -> None:
    site = client()
    assert refused(site, site.ask("evaluate", site.task(*place)))


def test_a_hello_beside_a_training_payload(client: MakeClient) -> None:
    """It made the guard see a hello and the executor a training task."""
    site = client(RECORD_LEVEL)
    both = site.task()
    both[wire.HELLO] = {"run": "run-1"}
    for task in ("train", "evaluate", "hello"):
        assert refused(site, site.ask(task, both))


@pytest.mark.parametrize(
    "hello", [{}, {"run": "r", "more": 1}, {"run": 7}, {"run": ["r"]}, {"run": "../../etc"}, {"run": "r" * 65}, "r", None]
)
def test_a_hello_that_is_none(hello: object, client: MakeClient) -> None:
    site = client()
    assert refused(site, site.ask("hello", Shareable({wire.HELLO: hello})))


@pytest.mark.parametrize("name", ["TRAIN", "validate", "submit_model", "", None, "train "])
def test_a_task_of_another_name(name: str, client: MakeClient) -> None:
    site = client()
    assert refused(site, site.ask(name, site.task()))


def test_a_guess_at_the_name_of_a_task_that_waits(client: MakeClient) -> None:
    """Tasks and results wait in the process under random names; a message that names one must not reach it by guessing."""
    site = client()
    for name in ("", "0", "run-1", "0" * 32, 7, None, ["run-1"]):
        assert refused(site, site.ask("train", Shareable({wire.HELD: name})))


def test_what_the_executor_runs_is_what_the_guard_saw(client: MakeClient) -> None:
    """The task is one object from the guard on: changing the message afterwards changes nothing."""
    site, sent = client(), None
    sent = site.task()
    answer = site.ask("train", sent)
    ((_, run, payload),) = site.trainer.did
    assert wire.reason_of(answer) is None
    assert (run.partition(".")[0], payload.round, payload.phase) == ("run-1", 0, 0)
    assert payload.tensors.keys() == site.broadcast().tensors.keys()


def test_equal_refusals_are_each_on_record(client: MakeClient) -> None:
    site = client(RECORD_LEVEL)
    for _ in range(5):
        site.ask("train", site.task(-5, -1))
    (path,) = site.guard.folder.rglob(audit_log.FILE)
    messages = audit_log.read_with_epsilon(path)["messages"]
    assert [(m["kind"], m["reason"]) for m in messages] == [("refusal", "task")] * 5


def test_an_evaluation_answers_in_a_fixed_form(client: MakeClient) -> None:
    """It told the server's run, scalars and whatever else the message had; now: place, declared metrics, the ledger's seal."""
    site = client()
    answer = wire.decode(site.ask("evaluate", site.task(2, 0)))
    assert answer == (Payload(2, 0, {}, {}, {"test/global/dice": 0.5}, ""), "")


def test_a_model_is_nobodys_to_ask_for_in_a_job_that_trains(client: MakeClient) -> None:
    site = client()
    assert refused(site, site.ask("model", Shareable({wire.MODEL: {"run": "run-1"}})))
    both = site.task()
    both[wire.MODEL] = {"run": "run-1"}
    for task in ("train", "evaluate", "model"):
        assert refused(site, site.ask(task, both))


@pytest.mark.parametrize("task", ["train", "hello", "evaluate", "masks"])
def test_a_refusal_is_no_task(task: str, client: MakeClient) -> None:
    """A server that sent one after a task nobody had answered had its word kept and paid as that task's."""
    site = client(SITE_LEVEL)
    site.guard.authorize(Kind.TRAIN, "run-1", site.broadcast())
    for word in (Reason.TRAINING, Reason.BUDGET):
        assert refused(site, site.ask(task, wire.refusal(word)))
    both = site.task()
    both.set_return_code(ReturnCode.EXECUTION_EXCEPTION)
    assert refused(site, site.ask("train", both))
    assert wire.reason_of(site.ask("train", site.task())) is None
