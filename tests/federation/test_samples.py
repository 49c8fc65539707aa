"""Learning curves: a site trains on some samples of its list, the smaller sets in the larger ones."""

from pathlib import Path

import pytest
import torch

from consilium.client.site_data import limit_training, load_site_data
from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.data.datalist import MOST_WORKERS, DataList, Item
from tests.conftest import small_cells


def listed(count: int) -> DataList:
    items = tuple(Item(Path(f"{i}.png"), i % 2) for i in range(count))
    return DataList(Path("datalist.json"), {"training": items, "validation": items[:4], "test": items[:5]})


def names(data: DataList) -> list[str]:
    return [item.image.stem for item in data.splits["training"]]


def test_a_smaller_cut_lies_in_a_larger_one_and_stays_as_listed() -> None:
    whole = listed(40)
    three, ten, thirty = (names(limit_training(whole, most, 0, "site-1")) for most in (3, 10, 30))
    assert [len(three), len(ten), len(thirty)] == [3, 10, 30]
    assert set(three) < set(ten) < set(thirty) < set(names(whole))
    assert thirty == sorted(thirty, key=int)
    assert names(limit_training(whole, 10, 0, "site-1")) == ten


def test_seed_and_site_draw_other_samples_and_the_other_splits_stay() -> None:
    whole = listed(40)
    ten = limit_training(whole, 10, 0, "site-1")
    assert names(limit_training(whole, 10, 1, "site-1")) != names(ten) != names(limit_training(whole, 10, 0, "site-2"))
    assert [len(ten.splits[split]) for split in ("validation", "test")] == [4, 5]
    assert (
        limit_training(whole, None, 0, "site-1")
        is limit_training(whole, 40, 0, "site-1")
        is limit_training(whole, 99, 0, "site-1")
        is whole
    )


def test_a_job_says_how_many(tmp_path: Path) -> None:
    raw = small_cells("fedit").model_dump()
    whole, few = (JobConfig.model_validate(raw | {"data": raw["data"] | {"most_training": most}}) for most in (None, 2))
    found = [load_site_data(one, "site-1", SiteConfig(), tmp_path).splits for one in (whole, few)]
    assert len(found[0]["training"]) > 2
    assert len(found[1]["training"]) == 2
    assert set(found[1]["training"]) < set(found[0]["training"])
    assert found[1]["test"] == found[0]["test"]


PRIVATE = {"privacy": {"unit": "site", "epsilon": 3, "clip": 1}}


@pytest.mark.parametrize(
    ("sections", "of_the_run", "quiet"),
    [({}, {}, False), ({}, PRIVATE, True), ({"statistics": {}}, {}, True), (PRIVATE, {}, True)],
)
def test_samples_answer_no_question_in_a_private_job_and_one_of_statistics(
    sections: dict[str, object], of_the_run: dict[str, object], quiet: bool, tmp_path: Path
) -> None:
    plain = small_cells("fedit").model_dump()
    config, run = JobConfig.model_validate(plain | sections), JobConfig.model_validate(plain | sections | of_the_run)
    assert load_site_data(config, "site-1", SiteConfig(), tmp_path, run=run).loading.ignore_unfit is quiet


def test_statistics_of_a_part_are_refused() -> None:
    """Counts of n and of n + 1 samples would differ by one patient's."""
    raw = small_cells("fedit").model_dump()
    with pytest.raises(ValueError, match=r"data\.most_training: 5 .* statistics"):
        JobConfig.model_validate(raw | {"data": raw["data"] | {"most_training": 5}, "statistics": {}})


def test_site_yaml_says_how_samples_are_read(tmp_path: Path) -> None:
    config, cache = small_cells("fedit"), tmp_path / "disk"
    given = SiteConfig(workers=3, bad_samples="skip", cache={"folder": cache, "gigabytes": 0.5})
    found = load_site_data(config, "a", given, tmp_path, tmp_path / "root").loading
    assert (found.folder, found.most, found.workers, found.skip) == (cache, 500_000_000, 3, True)
    for root, folder in ((tmp_path / "root", tmp_path / "root"), (None, tmp_path)):
        found = load_site_data(config, "a", SiteConfig(), tmp_path, root).loading
        assert (found.folder, found.workers, found.skip) == (folder, min(MOST_WORKERS, torch.get_num_threads()), False)
