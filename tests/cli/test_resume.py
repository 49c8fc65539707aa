"""`simulate --resume` goes on with what the run began with, and one that is refused changes no file."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from tests.conftest import run, small_text

SITES = ("north", "east", "a")


def simulate(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    return run(monkeypatch, "simulate", "job.yaml", "--data", "data", "--workspace", "w", *words)


def records(ward: str, count: int) -> str:
    answers = ("urgent", "soon", "later")
    return "".join(json.dumps({"input": f"{ward} {i}", "output": answers[i % 3]}) + "\n" for i in range(count))


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Leave a job of texts and three sites' data in an empty folder, which is then the one to work in."""
    monkeypatch.chdir(tmp_path)
    raw = small_text(rounds=1, local_steps=1).model_dump() | {"data": {"phantoms": None}}
    raw["task"]["max_new_tokens"] = 1
    Path("job.yaml").write_text(yaml.safe_dump(raw))
    for name in SITES:
        (folder := Path("data", name)).mkdir(parents=True)
        for split, count in (("training", 6), ("test", 2)):
            (folder / f"{split}.jsonl").write_text(records(name, count))
    return tmp_path


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


REFUSED = [
    (["--set", "strategy=local_only"], "is of another job; resume with the job.yaml it was made by"),
    (["--rounds", "1"], "training.rounds: 1: the run in w has done 2; give as many or more"),
    (["--sites", "a,north"], "--sites: a, north: the run in w has a, east, north;"),
]


def test_a_refused_resumption_changes_no_file(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate(monkeypatch, "--rounds", "2") == 0
    before, test = files(Path("w")), Path("data/east/test.jsonl")
    for options, message in REFUSED:
        capsys.readouterr()
        assert simulate(monkeypatch, "--resume", "--rounds", "3", *options) == 2
        assert message in capsys.readouterr().err
        assert files(Path("w")) == before
    kept = test.read_text()
    test.write_text(kept.replace("soon", "later"))
    assert simulate(monkeypatch, "--rounds", "3", "--resume") == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said == (
        f"--data: {job / 'data/east'} for east: has other entries or files than when the run in w began; put them back, "
        "or start anew in another --workspace"
    )
    assert files(Path("w")) == before
    test.write_text(kept)
    assert simulate(monkeypatch, "--rounds", "3", "--resume") == 0


def scores(words: Sequence[Sequence[str]], monkeypatch: pytest.MonkeyPatch) -> str:
    for one in words:
        assert simulate(monkeypatch, "--set", "strategy=centralized", *one) == 0
    return Path("w/results.json").read_text()


def test_pooled_data_keep_the_order_in_which_their_run_began(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    again = ["--rounds", "2", "--resume", "--sites", "east,a,north"]
    resumed = scores([["--rounds", "1", "--sites", "north,east,a"], again], monkeypatch)
    Path("w").rename("first")
    assert resumed == scores([["--rounds", "2", "--sites", "north,east,a"]], monkeypatch)
    Path("w").rename("second")
    assert resumed != scores([["--rounds", "2", "--sites", "east,a,north"]], monkeypatch)
