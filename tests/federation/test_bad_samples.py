"""Sites with samples that cannot be read: refused or left out, counted alike by guard and task, never by chance."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from consilium.adapters import adapter_state
from consilium.client.build import build_guard, build_site
from consilium.client.site_data import load_site_data, watch_files
from consilium.config.job import JobConfig
from consilium.config.site import CacheConfig, SiteConfig
from consilium.core.errors import ConsiliumError, DataError
from consilium.core.messages import SKIPPED
from consilium.core.storage import load_state
from consilium.data import disk_cache as cache_folder
from consilium.data.datalist import DataList, Loading
from consilium.data.text import Text
from consilium.privacy.dpsgd import DpSgd
from consilium.report.results_table import results_table
from consilium.report.tables import terminal_table
from consilium.runtime.engine import simulate
from consilium.tasks.registry import TASKS
from consilium.tasks.report import ReportConfig
from consilium.training.loop import train
from tests.conftest import assembled, small_config
from tests.data.storing import break_pixels, make_site


def config(**training: Any) -> JobConfig:
    return small_config("fedit", **{"rounds": 1, "local_steps": 2} | training)


def quiet(event: Mapping[str, Any]) -> None:
    pass


def site(folder: Path, training: int = 5, test: int = 1, **settings: Any) -> SiteConfig:
    return SiteConfig(datalist=make_site(folder, training, test=test), **settings)


def pixels(folder: Path, index: int) -> None:
    break_pixels(folder / f"Muster_Erika_training_{index}.png")


def header(folder: Path, index: int) -> None:
    (folder / f"Muster_Erika_training_{index}.png").write_bytes(b"no picture")


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_state(folder / "server" / "state.safetensors")[0]


def test_refusing_ends_the_job_there_with_the_file_named_in_its_own_log_only(tmp_path: Path) -> None:
    one, two = site(tmp_path / "a"), site(tmp_path / "b")
    header(tmp_path / "a", 1)
    with pytest.raises(DataError, match=r"Muster_Erika_training_1\.png: .*cannot be read"):
        simulate(assembled(config()), {"a": one, "b": two}, tmp_path / "run", quiet)


def test_pixels_that_fail_later_refuse_the_round_of_that_site(tmp_path: Path) -> None:
    one, two = site(tmp_path / "a"), site(tmp_path / "b")
    pixels(tmp_path / "a", 1)
    events: list[Mapping[str, Any]] = []
    with pytest.raises(ConsiliumError, match=r"1 of 2 results"):
        simulate(assembled(config()), {"a": one, "b": two}, tmp_path / "run", events.append)
    refused = [event for event in events if event["event"] == "refused"]
    assert [event["site"] for event in refused] == ["a"]
    assert "Muster_Erika_training_1.png: image cannot be read" in refused[0]["reason"]


@pytest.mark.parametrize("privacy", [{"unit": "site", "epsilon": 3, "clip": 0.5}, {"unit": "record", "epsilon": 3}])
def test_a_private_job_decodes_every_picture_before_anything_is_paid(privacy: dict, tmp_path: Path) -> None:
    """Pixels that fail amid a round would cost what the round costs."""
    job = assembled(JobConfig.model_validate(config().model_dump() | {"privacy": privacy}))
    refuses, skips = site(tmp_path / "a"), site(tmp_path / "b", bad_samples="skip")
    pixels(tmp_path / "a", 1)
    pixels(tmp_path / "b", 1)
    with pytest.raises(DataError, match=r"Muster_Erika_training_1\.png: .*cannot be read"):
        build_site(job, "a", refuses, tmp_path / "run", quiet)
    task = build_site(job, "b", skips, tmp_path / "run", quiet).context.task
    assert (task.num_samples, getattr(task, "skipped", 0)) == (5, 1)
    for index in range(5):
        pixels(tmp_path / "b", index)
    with pytest.raises(DataError, match="no training sample"):
        build_site(job, "b", skips, tmp_path / "run", quiet)
    assert build_site(assembled(config()), "a", refuses, tmp_path / "run", quiet).context.task.num_samples == 5


def test_an_entry_without_its_file_is_left_out_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = site(tmp_path / "a", bad_samples="skip")
    (tmp_path / "a" / "Muster_Erika_training_1.png").unlink()
    data = load_site_data(config(), "a", settings, tmp_path / "run")
    assert (len(data.splits["training"]), data.skipped) == (4, 1)
    assert load_site_data(config(), "a", settings, tmp_path / "run") == data
    assert caplog.text.count("no such file") == 2
    with pytest.raises(DataError, match="no such file"):
        load_site_data(config(), "a", settings.model_copy(update={"bad_samples": "refuse"}), tmp_path / "run")


def test_a_task_that_leaves_no_picture_out_needs_them_all(tmp_path: Path) -> None:
    """Of reports each round was charged whose picture was gone, although the site skips bad samples."""
    for number in range(2):
        (tmp_path / f"{number}.png").touch()
    texts = tuple(Text(f"line {n}", "see", "", ("x",), image=tmp_path / f"{n}.png") for n in range(2))
    data = DataList(tmp_path / "training.jsonl", {"training": texts, "validation": (), "test": ()}, Loading(skip=True))
    watch = watch_files(config().model_copy(update={"task": ReportConfig(name="report")}), data)
    watch.check_still_readable(lambda split, index: None)
    (tmp_path / "0.png").unlink()
    with pytest.raises(DataError, match=r"0\.png: .*No such file or directory"):
        watch.check_still_readable(lambda split, index: None)


def test_guard_and_task_count_what_is_left(tmp_path: Path) -> None:
    settings = site(tmp_path / "a", bad_samples="skip")
    header(tmp_path / "a", 1)
    pixels(tmp_path / "a", 2)
    job, folder = assembled(config()), tmp_path / "run"
    data = load_site_data(job.config, "a", settings, folder)
    guard = build_guard(job, "a", settings, folder, folder, quiet, data=data)
    header(tmp_path / "a", 3)  # what is found once holds for both
    made = build_site(job, "a", settings, folder, quiet, data=data)
    assert guard.num_samples == made.context.task.num_samples == 4


def test_skipping_trains_as_if_the_sample_were_not_there(tmp_path: Path) -> None:
    """Of five samples the last has no header, so indices, and with them draws, are those of a list of four."""
    bad, good = site(tmp_path / "a", test=0, bad_samples="skip", workers=2), site(tmp_path / "b", test=0)
    header(tmp_path / "a", 4)
    runs = [tmp_path / "bad", tmp_path / "good"]
    simulate(assembled(config()), {"a": bad, "b": good}, runs[0], quiet)
    whole = site(tmp_path / "c", training=4, test=0)
    simulate(assembled(config()), {"a": whole, "b": good}, runs[1], quiet)
    found, expected = map(tensors, runs)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    results = closing(runs[0])
    assert results["a"][SKIPPED] == 1
    assert SKIPPED not in results["b"]
    assert shown(results) == ["samples left out because they cannot be read: a 1"]


def closing(folder: Path) -> dict[str, dict[str, float]]:
    """Return the closing table of a run, by site."""
    return json.loads((folder / "results.json").read_text())


def shown(results: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return the lines below the closing table."""
    console = Console(width=100, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(terminal_table(results_table(results, TASKS["segmentation"].scores(config().task), "job"), 100))
    return [line.strip() for line in console.export_text().splitlines() if "left out" in line]


def test_what_is_left_out_is_not_told_where_scores_stay_at_the_site(tmp_path: Path) -> None:
    bad, good = site(tmp_path / "a", test=0, bad_samples="skip", share_metrics=False), site(tmp_path / "b", test=0)
    header(tmp_path / "a", 4)
    simulate(assembled(config(local_steps=1)), {"a": bad, "b": good}, tmp_path / "run", quiet)
    assert closing(tmp_path / "run")["a"] == {}


def test_a_resumed_run_leaves_out_the_same(tmp_path: Path) -> None:
    sites = {"a": site(tmp_path / "a", test=0, bad_samples="skip", workers=2), "b": site(tmp_path / "b", test=0)}
    pixels(tmp_path / "a", 3)
    job = assembled(config(rounds=2, local_steps=1))
    simulate(job, sites, tmp_path / "whole", quiet)

    def stop(event: Mapping[str, Any]) -> None:
        if event["event"] == "step" and event["round"] == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(job, sites, tmp_path / "parts", stop)
    assert (tmp_path / "parts" / "sites" / "a" / cache_folder.FOLDER).is_dir()
    simulate(job, sites, tmp_path / "parts", quiet, resume=True)
    found, expected = tensors(tmp_path / "parts"), tensors(tmp_path / "whole")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not list(tmp_path.glob(f"*/sites/*/{cache_folder.FOLDER}"))


def test_all_pixels_bad_ends_in_one_line(tmp_path: Path) -> None:
    settings = site(tmp_path / "a", bad_samples="skip")
    for index in range(5):
        pixels(tmp_path / "a", index)
    events: list[Mapping[str, Any]] = []
    with pytest.raises(ConsiliumError, match="1 of 2 results"):
        simulate(assembled(config()), {"a": settings, "b": site(tmp_path / "b")}, tmp_path / "run", events.append)
    reasons = [event["reason"] for event in events if event["event"] == "refused"]
    assert reasons == ["no training sample can be read; see the site's log, and repair the data"]


def test_record_level_noise_is_the_same_and_the_lost_record_adds_nothing(tmp_path: Path) -> None:
    """With every record lost the update is noise alone: that of a site whose whole gradient is 0, by the same seed."""
    job = assembled(config())
    ends = []
    for lost in (range(5), range(4), ()):
        folder = tmp_path / str(len(ends))
        settings = site(folder, bad_samples="skip")
        for index in lost:
            pixels(folder, index)
        made = build_site(job, "a", settings, tmp_path / f"run-{len(ends)}", quiet)
        params = dict(_params(made))
        dp = DpSgd(noise_multiplier=0.0, clip=1e-3, sample_rate=1.0, seed=3)
        model, task, plan = made.context.model, made.context.task, _sgd(job.config)
        train(model, task, params, set(params), plan, 0, lambda step: None, lambda p: None, dp)
        ends.append({name: parameter.detach().clone() for name, parameter in params.items()})
        assert made.context.task.skipped == len(lost)
    moved = [sum(float((end[n] - start).square().sum()) for n, start in job.initial.items()) ** 0.5 for end in ends]
    assert moved[0] == 0.0
    assert 0 < moved[1] <= 1e-3 / 5 * (1 + 1e-4)  # one record of an expected batch of five, clipped to 1e-3, lr 1
    assert moved[2] > moved[1]


def _sgd(job: JobConfig) -> Any:
    return job.training.model_copy(update={"optimizer": "sgd", "lr": 1.0, "local_steps": 1, "batch_size": 5})


def _params(made: Any) -> dict[str, torch.Tensor]:
    adapter_state.load(made.context.model, assembled(config()).initial)
    return adapter_state.tensors(made.context.model)


# the cache in a run ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_is_the_same_with_any_loading_and_leaves_no_pictures_in_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_folder, "RECENT", 0.0)  # samples are named by path from the start, however slow the machine
    ends = []
    for index, settings in enumerate(
        ({"workers": 0, "cache": CacheConfig(gigabytes=0)}, {"workers": 3}, {"cache": CacheConfig(folder=tmp_path / "kept")})
    ):
        sites = {name: site(tmp_path / name, **settings) for name in ("a", "b")}
        simulate(assembled(config(local_steps=3)), sites, tmp_path / f"run-{index}", quiet)  # all five samples
        ends.append(tensors(tmp_path / f"run-{index}"))
        assert not list((tmp_path / f"run-{index}").rglob(cache_folder.FOLDER))
    assert all(torch.equal(end[name], ends[0][name]) for end in ends for name in ends[0])
    count, _ = cache_folder.cache_count_and_bytes(tmp_path / "kept" / cache_folder.FOLDER)
    assert count == 24  # six samples of each site, and their passed checks


# validation -----------------------------------------------------------------------------------------------------------


def scored(folder: Path, **validate: Any) -> tuple[list[set[str]], dict[str, torch.Tensor], dict[str, float]]:
    """Return what each round validated, the closing tensors, and one site's closing metrics."""
    sites = {name: site(folder / name) for name in ("a", "b")}
    for name in sites:
        path = sites[name].datalist
        path.write_text(path.read_text().replace('"test"', '"validation"'))
    events: list[Mapping[str, Any]] = []
    settings = config(rounds=3, local_steps=1).model_dump(mode="json")
    settings["training"]["validate"] = validate
    simulate(assembled(JobConfig.model_validate(settings)), sites, folder / "run", events.append)
    rounds = [e["metrics"] for e in events if e["event"] == "metrics" and e["site"] == "a" and "train/loss" in e["metrics"]]
    stages = [{name.split("/")[1] for name in metrics if name.startswith("validation/")} for metrics in rounds]
    return stages, tensors(folder / "run"), closing(folder / "run")["a"]


@pytest.mark.slow
def test_validation_every_so_many_rounds_changes_nothing_but_scores(tmp_path: Path) -> None:
    both = {"global", "personalized"}
    stages, expected, closing = scored(tmp_path / "all")
    assert stages == [both] * 3
    found, end, last = scored(tmp_path / "some", every=2, stages=["global"])
    assert found == [set(), {"global"}, set()]
    assert all(torch.equal(end[name], expected[name]) for name in expected)
    assert last == closing
