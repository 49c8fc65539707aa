"""What TensorBoard shows while a run goes on: pictures at the site alone, means, rates, sizes; it costs nothing else."""

import json
import math
import os
from pathlib import Path
from unittest.mock import Mock, call

import numpy as np
import psutil
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.core.messages import Stage
from consilium.core.storage import load_state
from consilium.federation.job_assembly import assemble_job
from consilium.report.run_files import MEANS
from consilium.report.tracking import PICTURES, EventFile, SiteEvents
from consilium.runtime.engine import simulate
from tests.adversary.network.modes import open_to_others
from tests.conftest import small_config


def run(folder: Path, observer: Mock | None = None, **sections: object) -> None:
    """Run one round of two steps at two sites."""
    raw = small_config("fedit", rounds=1, local_steps=2, schedule="cosine").model_dump() | sections
    before = os.umask(0o022)
    try:
        sites = {"a": SiteConfig(), "b": SiteConfig()}
        simulate(assemble_job(JobConfig.model_validate(raw)), sites, folder, observer or (lambda event: None))
    finally:
        os.umask(before)


def seen(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder), size_guidance={"images": 0, "scalars": 0}).Reload()


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    return [(one.step, one.value) for one in seen(folder).Scalars(name)]


def lines(folder: Path, event: str) -> list[dict]:
    found = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [one for one in found if one["event"] == event]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "workspace"
    run(folder)
    return folder


def test_pictures_are_at_the_sites_and_nowhere_else(done: Path) -> None:
    for site in "ab":
        tags = seen(done / "sites" / site / "tb_events").Tags()["images"]
        assert set(tags) == {"validation/global", "validation/personalized"}
    (picture,) = seen(done / "sites" / "a" / "tb_events").Images("validation/global")
    assert picture.step == 0
    assert picture.width > picture.height > 100  # a picture, its reference and the answer side by side, two rows
    for writer in (done / "tb_events").iterdir():
        assert seen(writer).Tags()["images"] == []


def test_the_learning_rate_of_every_step(done: Path) -> None:
    """Cosine over two steps of 3e-3: the first has all of it, the second half."""
    rates = scalars(done / "sites" / "a" / "tb_events", "steps/lr")
    assert [step for step, _ in rates] == [1, 2]
    assert [rate for _, rate in rates] == pytest.approx([3e-3, 1.5e-3])


def test_means_are_those_of_the_record(done: Path) -> None:
    losses = [one["metrics"]["train/loss"] for one in lines(done, "result")]
    assert len(losses) == 2
    assert scalars(done / "tb_events" / MEANS, "train/loss") == [(0, pytest.approx(sum(losses) / 2))]
    dice = [one["metrics"]["test/global/dice"] for one in lines(done, "final")]
    assert scalars(done / "tb_events" / MEANS, "test/global/dice") == [(1, pytest.approx(sum(dice) / 2))]


def test_sizes_are_those_of_what_left_and_of_what_came_of_it(done: Path) -> None:
    for site in "ab":
        (path,) = (done / "sites" / site).rglob("state.safetensors")
        sent = [tensor for name, tensor in load_state(path)[0].items() if name.startswith("reply/")]
        size = math.sqrt(sum(float(t.double().square().sum()) for t in sent))
        assert scalars(done / "tb_events" / site, "update/norm") == [(0, pytest.approx(size, rel=1e-5))]
    (_, merged), *_ = scalars(done / "tb_events" / "server", "update/norm")
    assert 0 < merged <= max(scalars(done / "tb_events" / site, "update/norm")[0][1] for site in "ab")


def test_a_run_is_a_file_for_each_site_and_between_two_entries_none_is_open_and_no_thread_waits(tmp_path: Path) -> None:
    """A server has one for each of its thousand sites."""
    one, before = psutil.Process(), (psutil.Process().num_fds(), psutil.Process().num_threads())
    files = {name: EventFile(tmp_path / name) for name in "abc"}
    for step in range(3):
        for number, file in enumerate(files.values()):
            file.add_scalars({"loss": number + step, "dice": 0.5}, step)
    assert (one.num_fds(), one.num_threads()) == before
    for number, name in enumerate(files):
        assert scalars(tmp_path / name, "loss") == [(step, number + step) for step in range(3)]
        assert scalars(tmp_path / name, "dice") == [(step, 0.5) for step in range(3)]


def test_all_files_are_the_users_alone_even_in_an_open_folder(done: Path) -> None:
    for folder in (done, *(done / "sites" / site for site in "ab")):
        assert open_to_others(folder / "tb_events") == []


@pytest.mark.slow
def test_no_single_sites_size_is_shown_where_noise_comes_at_the_server(tmp_path: Path) -> None:
    run(tmp_path / "run", privacy={"unit": "site", "noise_multiplier": 1.0, "clip": 0.5, "trust": "central"})
    record = tmp_path / "run" / "tb_events"
    assert "update/norm" not in seen(record / "a").Tags()["scalars"]
    assert "update/norm" not in seen(record / MEANS).Tags()["scalars"]
    assert {"update/norm", "privacy/epsilon"} <= set(seen(record / "server").Tags()["scalars"])


def test_what_cannot_be_written_costs_a_line_and_no_bit_of_the_result(done: Path, tmp_path: Path) -> None:
    for site in "ab":
        (tmp_path / "run/sites" / site).mkdir(parents=True)
        (tmp_path / "run/sites" / site / "tb_events").write_text("in the way")
    observer = Mock()
    run(tmp_path / "run", observer)
    told = [call.args[0] for call in observer.call_args_list if call.args[0]["event"] == "undrawn"]
    assert sorted((one["site"], "FileExistsError" in one["reason"]) for one in told) == [("a", True), ("b", True)]
    whole, other = (load_state(folder / "server" / "state.safetensors")[0] for folder in (done, tmp_path / "run"))
    assert whole.keys() == other.keys()
    assert all(torch.equal(whole[name], other[name]) for name in whole)


@pytest.mark.parametrize("rounds", [1, 7, 20, 21, 200, 1000])
def test_a_long_run_has_pictures_of_few_rounds_with_the_first_and_the_last(rounds: int) -> None:
    site = SiteEvents(Path("unused"), rounds, Mock())
    drawn = [round for round in range(rounds) if site.is_picture_round(round)]
    assert drawn[0] == 0
    assert drawn[-1] == rounds - 1
    assert min(rounds, PICTURES // 2) <= len(drawn) <= PICTURES + 1


def test_a_site_without_pictures_draws_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    complain = Mock()
    site = SiteEvents(tmp_path / "tb_events", 1, complain)
    site.write_pictures(0, Stage.GLOBAL, lambda: None)
    site.write_pictures(0, Stage.GLOBAL, Mock(side_effect=RuntimeError("CUDA out of memory")))
    site.write_scalars({"train/loss": 1.0}, 0)
    assert complain.call_args_list == [call("tb_events: RuntimeError")]
    assert "out of memory" in caplog.text


def picture(folder: Path, name: str = "validation/global") -> np.ndarray:
    """Return a picture of a site's events, for a person to look at."""
    import io

    (one,) = seen(folder).Images(name)
    return np.asarray(Image.open(io.BytesIO(one.encoded_image_string)))


def test_a_picture_is_not_blank(done: Path) -> None:
    pixels = picture(done / "sites" / "a" / "tb_events")
    assert 20 < pixels.mean() < 235
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 100
