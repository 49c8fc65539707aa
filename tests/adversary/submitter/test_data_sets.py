"""A submitter who names data sets: other budgets for the same list, names that are paths, names to be guessed."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from consilium.client.build import build_guard
from consilium.config.job import JobConfig
from consilium.config.site import load_site
from consilium.core.errors import ConfigError, DataError, Reason, RefusedError
from consilium.core.messages import Kind, Payload, SiteInfo
from consilium.data.synthetic.phantoms import make_phantoms
from consilium.federation.job_assembly import assemble_job
from consilium.privacy.guard.guard import Guard
from tests.conftest import small_config, small_text

BUDGET = {"budgets": {"site": {"epsilon": 3.1}}}


def guard(folder: Path, dataset: str | None, sets: dict[str, Any], run: str) -> Guard:
    (folder / "site.yaml").write_text(yaml.safe_dump({"datasets": sets, "privacy": BUDGET}))
    raw = small_config("fedit").model_dump() | {"data": {"dataset": dataset}}
    job = assemble_job(JobConfig.model_validate(raw | {"privacy": {"unit": "site", "epsilon": 3, "clip": 0.5}}))
    return build_guard(job, "a", load_site(folder / "site.yaml"), folder / run, folder, lambda event: None, job_id=run)


def train(one: Guard) -> Payload:
    """Let a guard release the whole run."""
    sent = one.strategy.payload(one.strategy.initialize(assemble_job(one.config).initial), SiteInfo("a", 1))
    for round in range(2):
        task = one.authorize(Kind.TRAIN, one.job_id, Payload(round, 0, sent.tensors))
        released = one.release(task, Payload(round, 0, {n: sent.tensors[n] for n in sent.tensors}))
    return released


def test_the_same_patients_under_another_name_are_the_same_budget(tmp_path: Path) -> None:
    path = make_phantoms(tmp_path / "list", "fundus", "a", 0, 4, 1, 1, 64, 0.5, 0.5)
    copy = path.with_name("copy.json")
    copy.write_text(path.read_text())
    sets = {"one": {"datalist": str(path)}, "two": {"datalist": str(copy), "patients": "one"}}
    train(guard(tmp_path, "one", sets, "run-1"))
    with pytest.raises(RefusedError) as caught:
        train(guard(tmp_path, "two", sets, "run-2"))
    assert caught.value.reason is Reason.BUDGET
    with pytest.raises(ConfigError, match="one budget would count as two"):
        guard(tmp_path, "two", {"one": {"datalist": str(path)}, "two": {"datalist": str(path)}}, "run-3")


def test_another_task_gets_neither_unlisted_texts_nor_a_budget_for_them(tmp_path: Path) -> None:
    """The site lists pictures. Reports lie beside the list, and a job for texts would be booked under the folder's name."""
    path = make_phantoms(tmp_path, "fundus", "a", 0, 4, 1, 1, 64, 0.5, 0.5)
    (path.parent / "training.jsonl").write_text('{"input": "a report", "output": "urgent"}\n')
    (tmp_path / "site.yaml").write_text(yaml.safe_dump({"datalist": str(path), "privacy": BUDGET}))
    raw = small_text("fedit").model_dump() | {"data": {}, "privacy": {"unit": "site", "epsilon": 3, "clip": 0.5}}
    job = assemble_job(JobConfig.model_validate(raw))
    with pytest.raises(DataError, match=r"datalist\.json: holds no training"):
        build_guard(job, "a", load_site(tmp_path / "site.yaml"), tmp_path / "run", tmp_path, lambda event: None, job_id="run")


@pytest.mark.parametrize("thin", [{"slices": {"every": 4, "empty": "drop"}}, {"tiles": {"size": 64, "empty": 0.5}}])
def test_the_number_of_records_is_no_count_of_labels(thin: dict[str, Any]) -> None:
    """It leaves with the hello, before any row is in the ledger: with another `every` a job, it counts every plane's labels."""
    raw = small_config("fedit").model_dump()
    raw["task"] |= thin
    assemble_job(JobConfig.model_validate(raw))
    assemble_job(JobConfig.model_validate(raw | {"privacy": {"unit": "site", "epsilon": 3, "clip": 0.5}}))
    record = JobConfig.model_validate(raw | {"privacy": {"unit": "record", "epsilon": 3}})
    with pytest.raises(ConfigError, match=f"task.{next(iter(thin))}.empty: .* write keep"):
        assemble_job(record)


@pytest.mark.parametrize("name", ["../one", "/etc/passwd", "", "a b", "x" * 65, "one\n", "${SITE}", ".", 7, ["one"]])
def test_a_name_is_no_path(name: Any) -> None:
    raw = small_config("fedit").model_dump() | {"data": {"dataset": name}}
    with pytest.raises(ValueError, match="dataset"):
        JobConfig.model_validate(raw)


@pytest.mark.parametrize("name", ["other", "ONE", "one.", None])
def test_a_guess_is_told_one_word(name: str | None, tmp_path: Path) -> None:
    """Whether it is a wrong name or none at all, and however many sets there are."""
    lists = {n: str(make_phantoms(tmp_path / n, "fundus", n, 0, 4, 1, 1, 64, 0.5, 0.5)) for n in ("one", "two")}
    with pytest.raises(RefusedError) as caught:
        guard(tmp_path, name, {n: {"datalist": path} for n, path in lists.items()}, "run-1")
    assert caught.value.reason is Reason.DATASET
    assert not {"one", "two"} & set(Reason.DATASET.text.replace(",", "").split())
