"""What `simulate` refuses before anything starts, and how it ends when it is interrupted."""

import json
import os
import signal
import subprocess
import sysconfig
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from consilium.cli.simulate import site_names
from consilium.config.site import DatasetConfig, SiteConfig
from consilium.core.errors import ConfigError
from consilium.federation.site_names import sites_record
from consilium.report.live_view import LiveView
from tests.conftest import JOBS, run, small_config, training_only

JOB = ["simulate", str(JOBS / "quickstart")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sites", "0"], "--sites: 0: expected a number from 1 to 10000, or names"),
        (["--sites", "a,a"], "--sites: 'a' is there twice"),
        (["--sites", "a/b"], "'a/b' cannot name a site; use letters"),
        (["--sites", "..,b"], "'..' cannot name a site"),
        (["--sites", "a\nb"], r"'a\nb' cannot name a site"),
        (["--data", "data", "--sites", "9"], "--sites: 9: --data data has folders for 2 (site-1, site-2); ask for at most 2"),
        (["--data", "data", "--sites", "site-1,zz"], "--sites: 'zz': --data data has no such site; it has site-1, site-2"),
        (["--set", "a..b=1"], "is not KEY=VALUE"),
        (["--set", "training=3"], "--set: training: 3: expected"),
        (["--set", "training.rounds=0"], "--set: training.rounds: 0: expected"),
        (["--set", "training={rounds: 0}"], "--set: training.rounds: 0: expected"),
        (["--set", "training.momentum=0.5"], "--set: training.momentum: 0.5 is of optimizer sgd"),
        (["--set", "training.lr=["], "--set: 'training.lr=[': the value is not valid YAML"),
        (["--set", "training.lr.x=1"], "training.lr.x: there is no section above it"),
        (["--set", "x=" + "[" * 3000], "the value is not valid YAML"),
        (["--workspace", "file"], "--workspace: file: cannot be made (File exists)"),
        (["--workspace", "a b", "--engine", "flare"], "a path without spaces, quotes and #"),
        (["--together", "2", "--workers", "2"], "--together: only in one process; leave --workers and --engine out"),
        (["--together", "2", "--engine", "flare"], "--together: only in one process; leave --workers and --engine out"),
        (["--workspace", "w" * 300], "cannot be made (File name too long)"),
        (["--format", "xml"], "consilium simulate: Invalid value for '--format': 'xml' is not one of 'txt', 'json'"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_a_wrong_option_is_one_line_and_nothing_starts(
    options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "consilium.flare.job.simulator.Simulator.run_in_child", lambda _, work, *given: work(*given)
    )  # seconds less
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    for name in ("site-1", "site-2"):
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / "data" / name / "datalist.json").write_text('{"training": []}')
    assert run(monkeypatch, *JOB, *options) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--workers", "2", "--set", "strategy=centralized"], "--workers: strategy 'centralized' trains in one place"),
        (
            ["--engine", "flare", "--set", "strategy=centralized"],
            "{job}: strategy.name: 'centralized' pools all sites' data; only --engine inprocess can",
        ),
    ],
)
def test_a_run_that_is_refused_leaves_no_folder(
    options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("consilium.flare.job.simulator.Simulator.run_in_child", lambda _, work, *given: work(*given))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(small_config().model_dump()))
    assert run(monkeypatch, "simulate", "job.yaml", *options) == 2
    assert message.format(job="job.yaml") in capsys.readouterr().err
    assert list((tmp_path / "runs").iterdir()) == []
    (tmp_path / "mine" / "empty").mkdir(parents=True)
    assert run(monkeypatch, "simulate", "job.yaml", *options, "--workspace", "mine") == 2
    assert (tmp_path / "mine" / "empty").is_dir()


def test_a_folder_that_may_not_be_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "access", lambda _, mode, **__: not mode & os.W_OK)  # root may write anywhere
    assert run(monkeypatch, *JOB, "--workspace", tmp_path / "w") == 2
    assert "cannot be written to; change its permissions" in capsys.readouterr().err


def test_who_takes_part(tmp_path: Path) -> None:
    for name in ("a", "b", "Zürich.2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "datalist.json").touch()
    (tmp_path / "no site").mkdir()
    assert site_names("", None) == ["site-1", "site-2", "site-3"]
    assert site_names("2", None) == ["site-1", "site-2"]
    assert site_names("north, south", None) == ["north", "south"]
    assert site_names("", tmp_path) == ["Zürich.2", "a", "b"]
    assert site_names("2", tmp_path) == ["Zürich.2", "a"]
    assert site_names("b,a", tmp_path) == ["b", "a"]
    for wrong in ("-1", "9" * 5000, "A,a", ",", "server,b", "a b", "x" * 101):
        with pytest.raises(ConfigError, match="--sites: "):
            site_names(wrong, None)
    (tmp_path / "c\x1b[31m").mkdir()
    (tmp_path / "c\x1b[31m" / "datalist.json").touch()
    assert site_names("", tmp_path) == ["Zürich.2", "a", "b", "c-31m"]


def test_a_state_that_a_simulation_does_not_use_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in (("a", "state: s"), ("b", "{}"), ("c", "{state: s, privacy: {ledger: l.sqlite}}"), ("d", "state: t")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "site.yaml").write_text(text)

    def stop(*_: Any) -> None:
        raise ConfigError("stop")

    monkeypatch.setattr("consilium.federation.job_assembly.assemble_job", stop)
    assert run(monkeypatch, *JOB, "--workspace", tmp_path / "w", "--data", tmp_path) == 2
    note = "a, d: a simulation keeps ledger and records in its workspace; site.yaml's `state` is not used: "
    assert capsys.readouterr().err.splitlines() == [f"{note}set `privacy.ledger` to add runs up", "stop"]
    assert run(monkeypatch, *JOB, "--workspace", tmp_path / "w", "--data", tmp_path, "--sites", "b,c") == 2
    assert capsys.readouterr().err.splitlines() == ["stop"]


def test_ctrl_c_tells_the_command_to_go_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    config = training_only(small_config(rounds=2, local_steps=1), test=1)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(config.model_dump()))

    shown = LiveView.__call__

    def stop(view: LiveView, event: Mapping[str, Any]) -> None:
        if event["event"] == "step" and event["round"] == 1:
            raise KeyboardInterrupt
        shown(view, event)

    monkeypatch.setattr(LiveView, "__call__", stop)
    words = ["simulate", "job.yaml", "--sites", "2", "--workspace=my run", "--set", "training.lr=0.001"]
    assert run(monkeypatch, *words) == 130
    (said,) = capsys.readouterr().err.splitlines()
    command = "simulate job.yaml --sites 2 --set training.lr=0.001 --workspace 'my run' --resume"
    assert said == f"interrupted; go on with: consilium {command}"
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    other = ["simulate", "job.yaml", "--set", "training.lr=0.001", "--workspace", "my run", "--resume", "--sites", "3"]
    assert run(monkeypatch, *other) == 2
    assert "--sites: site-1, site-2, site-3: the run in my run has site-1, site-2;" in capsys.readouterr().err
    again = ["simulate", "job.yaml", "--set", "training.lr=0.001", "--workspace", "my run", "--resume", "--format", "json"]
    capsys.readouterr()
    assert run(monkeypatch, *again) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["results"].keys() == found["losses"].keys() == {"site-1", "site-2"}
    assert json.loads((tmp_path / "my run/results.json").read_text()) == found["results"]
    assert yaml.safe_load((tmp_path / "my run/job.yaml").read_text())["training"]["lr"] == 0.001


def keep(folder: Path, sites: Any) -> None:
    """Leave what a run's folder keeps of its sites."""
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").touch()
    (folder / "simulation.json").write_text(json.dumps({"sites": sites}))


@pytest.mark.parametrize(
    ("was", "options", "message"),
    [
        (["/d/a"], [], "--sites: site-1, site-2, site-3: the run in w has a; give its --sites and --data again"),
        (["/d/a"], ["--sites", "a"], "--data: generated data for a: the run in w has /d/a; give --data as for that run"),
        (
            ["/d/a"],
            ["--data", "d", "--sites", "a"],
            "--data: {d}/a/datalist.json for a: the run in w has /d/a; give --data as for that run",
        ),
        (["{d}/a/datalist.json"], ["--data", "d", "--sites", "b"], "--sites: b: the run in w has a; give its --sites and"),
        (None, ["--data", "d", "--sites", "a"], "--data: {d}/a/datalist.json for a: the run in w has generated data; give"),
        (None, ["--sites", "2"], "--sites: site-1, site-2: the run in w has a; give its --sites and --data again"),
        (7, [], "--resume: w/simulation.json: cannot be read; start the run anew in another --workspace"),
    ],
)
def test_a_run_does_not_go_on_with_other_sites_or_data(
    was: Any,
    options: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        (tmp_path / "d" / name).mkdir(parents=True)
        (tmp_path / "d" / name / "datalist.json").write_text('{"training": []}')
    place = str(tmp_path / "d")
    keep(Path("w"), {"a": [one.replace("{d}", place) for one in was] if isinstance(was, list) else was})
    assert run(monkeypatch, *JOB, "--workspace", "w", "--resume", *options) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert message.replace("{d}", place) in said


def test_who_takes_part_in_a_run_that_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own sites where nothing else is said; of a former version's run, which keeps none, those of the command."""
    asked: list[list[str]] = []

    def stop(wanted: Any) -> None:
        asked.append(wanted.sites)
        raise ConfigError("stop")

    monkeypatch.setattr("consilium.cli.simulate._simulate_in_process", stop)
    keep(tmp_path / "w", {"north": None, "a": None})
    run(monkeypatch, *JOB, "--workspace", tmp_path / "w", "--resume")
    run(monkeypatch, *JOB, "--workspace", tmp_path / "w", "--resume", "--sites", "a,north")
    (tmp_path / "w" / "simulation.json").write_text("{}")
    run(monkeypatch, *JOB, "--workspace", tmp_path / "w", "--resume")
    assert asked == [["north", "a"], ["north", "a"], ["site-1", "site-2", "site-3"]]


def test_what_a_run_keeps_of_its_sites() -> None:
    two = {"x": DatasetConfig(datalist=Path("/d/x.json")), "b": DatasetConfig(datalist=Path("/d/b.json"))}
    sites = {
        "generated": SiteConfig(checkpoints=Path("/c")),
        "one": SiteConfig(datalist=Path("/d/../e.json")),
        "two": SiteConfig(datasets=two),
        "settings": SiteConfig(device="cpu"),
    }
    lists = {"generated": None, "one": ["/e.json"], "two": ["/d/b.json", "/d/x.json"], "settings": []}
    assert sites_record(sites) == (lists, {"generated": "", "one": "", "two": " ", "settings": ""})


def test_ctrl_c_before_the_first_round_and_with_flare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("consilium.federation.job_assembly.assemble_job", stop)
    assert run(monkeypatch, *JOB, "--workspace", tmp_path / "w") == 130
    assert "interrupted; no round is finished: start it anew" in capsys.readouterr().err
    monkeypatch.setattr("consilium.flare.job.simulator.Simulator.run_in_child", stop)
    assert run(monkeypatch, *JOB, "--workspace", tmp_path / "w", "--engine", "flare") == 130
    assert "a run of --engine flare cannot be resumed: start it anew" in capsys.readouterr().err


def processes(mark: str) -> list[psutil.Process]:
    """Return the living processes that have a text in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if mark in process.environ().values():
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.parametrize(
    ("engine", "number"),
    [
        pytest.param("inprocess", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("flare", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("flare", signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("inprocess", signal.SIGINT, marks=pytest.mark.long),
        pytest.param("flare", signal.SIGTERM, marks=pytest.mark.long),
    ],
)
def test_no_process_is_left(engine: str, number: signal.Signals, tmp_path: Path) -> None:
    workspace, command = tmp_path / "run", Path(sysconfig.get_path("scripts")) / "consilium"
    words = [str(command), *JOB, "--engine", engine, "--workspace", str(workspace), "--set", "training.rounds=50"]
    environment = os.environ | {"MARK": str(tmp_path), "OMP_NUM_THREADS": "1"}
    begun = subprocess.Popen(words, env=environment, start_new_session=True, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
    log = workspace / "metrics.jsonl"
    while not (log.is_file() and '"result"' in log.read_text()):
        assert begun.poll() is None
        time.sleep(0.2)
    assert len(processes(str(tmp_path))) == 1 if engine == "inprocess" else len(processes(str(tmp_path))) > 4
    begun.send_signal(number)
    _, error = begun.communicate(timeout=60)
    if number == signal.SIGKILL:  # nobody is left to end the others: they see it themselves
        assert psutil.wait_procs(processes(str(tmp_path)), timeout=30)[1] == []
        return
    assert begun.returncode == 130
    assert "interrupted; " in error.decode()
    assert processes(str(tmp_path)) == []
