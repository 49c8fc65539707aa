"""Several data sets a site: which one a job gets, what is refused, and what budgets they have."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from consilium.client.build import build_guard
from consilium.client.site_data import ledger_dataset_name, load_site_data
from consilium.config.data import DatasetConfig
from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig, find_site, load_site
from consilium.core.errors import ConfigError, Reason, RefusedError
from consilium.data.synthetic.phantoms import make_phantoms
from consilium.federation.job_assembly import assemble_job
from tests.conftest import small_config


def site(path: Path, **values: Any) -> SiteConfig:
    (path / "site.yaml").write_text(yaml.safe_dump(values))
    return load_site(path / "site.yaml")


def job(**data: Any) -> JobConfig:
    raw = small_config("fedit").model_dump()
    return JobConfig.model_validate(raw | {"data": data})


def two(path: Path) -> SiteConfig:
    for name in ("old", "new"):
        make_phantoms(path / name, "fundus", name, 0, 3 if name == "old" else 5, 1, 1, 64, 0.5, 0.5)
    lists = {name: {"datalist": f"{name}/datalist.json"} for name in ("old", "new")}
    return site(path, datasets=lists)


def test_a_job_gets_the_set_that_it_names(tmp_path: Path) -> None:
    both = two(tmp_path)
    for name, count in (("old", 3), ("new", 5)):
        assert len(load_site_data(job(dataset=name), "a", both, tmp_path).splits["training"]) == count


@pytest.mark.parametrize(("wanted", "told"), [("other", "the job wants data set 'other'"), (None, "names none of several")])
def test_a_job_that_names_another_or_none_is_refused_in_one_line(wanted: str | None, told: str, tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=f"{told}.*new, old") as caught:
        load_site_data(job(dataset=wanted), "a", two(tmp_path), tmp_path)
    assert "\n" not in str(caught.value)
    assert caught.value.reason is Reason.DATASET
    assert not {"old", "new", str(tmp_path)} & set(caught.value.reason.text.split())


def test_the_short_form_has_no_name_to_be_asked_for(tmp_path: Path) -> None:
    one = SiteConfig(datalist=make_phantoms(tmp_path / "a", "fundus", "a", 0, 2, 1, 1, 64, 0.5, 0.5))
    assert len(load_site_data(job(), "a", one, tmp_path).splits["training"]) == 2
    with pytest.raises(RefusedError, match="it has one without a name"):
        load_site_data(job(dataset="fundus"), "a", one, tmp_path)
    with pytest.raises(RefusedError, match="it has none"):
        load_site_data(job(dataset="fundus"), "a", SiteConfig(), tmp_path)


def test_a_single_named_set_needs_no_naming(tmp_path: Path) -> None:
    path = make_phantoms(tmp_path / "a", "fundus", "a", 0, 2, 1, 1, 64, 0.5, 0.5)
    one = site(tmp_path, datasets={"fundus": {"datalist": str(path)}})
    for data in ({}, {"dataset": "fundus"}):
        assert len(load_site_data(job(**data), "a", one, tmp_path).splits["training"]) == 2
        assert ledger_dataset_name(job(**data), "a", one, load_site_data(job(**data), "a", one, tmp_path)) == "fundus"


def test_phantoms_never_stand_in_for_a_set_that_is_named() -> None:
    raw = small_config("fedit").model_dump()
    raw["data"]["dataset"] = "fundus"
    with pytest.raises(ValueError, match="give one of them"):
        JobConfig.model_validate(raw)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"datalist": "a.json", "datasets": {"b": {"datalist": "b.json"}}}, "short form"),
        ({"datasets": {"../b": {"datalist": "b.json"}}}, "datasets"),
        ({"datasets": {"b": {}}}, "datalist"),
        ({"datasets": {"b": {"datalist": "b.json", "labels": {1: ["a/b"]}}}}, "labels"),
        ({"datasets": {"b": {"datalist": "b.json", "labels": {True: "disc"}}}}, "labels"),
        ({"datasets": {"b": {"datalist": "b.json", "labels": {1.5: "disc"}}}}, "labels"),
        ({"datasets": {"b": {"datalist": "b.json", "labels": {1: "disc", "1": "cup"}}}}, "every label once"),
        ({"datasets": {"b": {"datalist": "b.json", "labels": {}}}}, "labels"),
        ({"datasets": {"b": {"datalist": "b.json", "labels": {1: None}}}}, "labels"),
    ],
)
def test_what_a_site_cannot_say(values: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=told):
        site(tmp_path, **values)


def test_the_same_files_under_two_names_are_one_budget(tmp_path: Path) -> None:
    """However the second one is written: a submitter who names both would spend the budget twice."""
    folder = tmp_path / "set"
    make_phantoms(folder, "fundus", "a", 0, 2, 1, 1, 64, 0.5, 0.5)
    os.link(folder / "datalist.json", tmp_path / "hard.json")
    (tmp_path / "soft").symlink_to(folder)
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "training.jsonl").write_text('{"input": "a", "output": "b"}\n')
    ways = [("set/datalist.json", "set/../set/datalist.json"), ("set/datalist.json", "hard.json"), ("set/datalist.json", "set")]
    ways += [("set/datalist.json", "soft/datalist.json"), ("texts", "texts/training.jsonl"), (".", "set/datalist.json")]
    ways += [("absent/a.json", "absent/../absent/a.json")]
    for first, second in ways:
        lists = {"a": {"datalist": first}, "b": {"datalist": second}}
        with pytest.raises(ConfigError, match="count as two"):
            site(tmp_path, datasets=lists)
        same = {name: one | {"patients": "ward-7"} for name, one in lists.items()}
        assert set(site(tmp_path, datasets=same).datasets) == {"a", "b"}
        assert site(tmp_path, datasets=lists, privacy={"dataset": "ward-7"}).privacy.dataset == "ward-7"
    site(tmp_path, datasets={"a": {"datalist": "set/datalist.json"}, "b": {"datalist": "texts"}})


def test_budgets_are_by_set_unless_the_site_says_otherwise(tmp_path: Path) -> None:
    both, named = two(tmp_path), {n: job(dataset=n) for n in ("old", "new")}

    def ledgers(where: SiteConfig) -> list[str]:
        return [
            ledger_dataset_name(config, "a", where, load_site_data(config, "a", where, tmp_path)) for config in named.values()
        ]

    assert ledgers(both) == ["old", "new"]
    shared = {name: one.model_copy(update={"patients": "eyes"}) for name, one in both.datasets.items()}
    assert ledgers(both.model_copy(update={"datasets": shared})) == ["eyes", "eyes"]
    assert ledgers(both.model_copy(update={"privacy": both.privacy.model_copy(update={"dataset": "all"})})) == ["all", "all"]


def private(**data: Any) -> Any:
    return assemble_job(
        JobConfig.model_validate(job(**data).model_dump() | {"privacy": {"unit": "site", "epsilon": 3, "clip": 0.5}})
    )


def test_a_list_that_gets_a_name_does_not_get_a_new_budget(tmp_path: Path) -> None:
    from consilium.core.messages import Kind, Payload

    path = make_phantoms(tmp_path / "a", "fundus", "a", 0, 4, 1, 1, 64, 0.5, 0.5)
    budget = {"budgets": {"site": {"epsilon": 3.1}}}

    def guard(**values: Any) -> Any:
        where = site(tmp_path, **values, privacy=budget)
        return build_guard(private(), "a", where, tmp_path / "run", tmp_path, lambda event: None)

    first = guard(datalist=str(path))
    first.ledger.charge_once(first.replay.charges.row("r", (0, 0)), first.policy.budgets)
    renamed = guard(datasets={"fundus": {"datalist": str(path)}})
    with pytest.raises(RefusedError, match=f"patients: {path}") as caught:
        renamed.authorize(Kind.HELLO, "run-2", Payload(-1, -1, {}))
    assert caught.value.reason is Reason.LEDGER
    kept = guard(datasets={"fundus": {"datalist": str(path), "patients": str(path)}})
    assert kept.ledger.entries(kept.dataset) == first.ledger.entries()


def test_a_simulations_folder_may_hold_a_site_with_several(tmp_path: Path) -> None:
    from consilium.config.site import Given

    (tmp_path / "data" / "a").mkdir(parents=True)
    two(tmp_path / "data" / "a")
    found = find_site("a", Given(tmp_path / "data"))
    assert len(load_site_data(job(dataset="new"), "a", found, tmp_path).splits["training"]) == 5


def test_a_kits_site_yaml_keeps_label_values_whole() -> None:
    """JSON has only texts for keys, and kits are written through it."""
    given = SiteConfig(datasets={"a": DatasetConfig(datalist=Path("a.json"), labels={1: ("disc",), "LV": ()})})
    again = SiteConfig.model_validate(json.loads(json.dumps(given.model_dump(mode="json"))))
    assert again == given
    assert set(again.datasets["a"].labels or {}) == {1, "LV"}


def test_fields_that_lost_their_indentation_are_sent_back_to_their_section(tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text("privacy:\nbudgets: {record: {epsilon: 5}}\ndataset: ward\n")
    with pytest.raises(ConfigError) as wrong:
        load_site(tmp_path / "site.yaml")
    assert "budgets: unknown field; write privacy.budgets instead" in str(wrong.value)
    assert "dataset: unknown field; write privacy.dataset instead" in str(wrong.value)
    (tmp_path / "site.yaml").write_text("privacy:\n  budgets: {record: {epsilon: 5}}\n  dataset: ward\n")
    assert load_site(tmp_path / "site.yaml").privacy.dataset == "ward"
