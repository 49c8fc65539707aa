"""What is printed at the end of a run, and the exit code."""

import json
from pathlib import Path

import pytest
import typer
import yaml

from consilium.cli.print_results import print_results
from consilium.report.page.run_page import run_page
from consilium.report.run_record import read_run
from tests.conftest import small_config

WHY = "task.max_new_tokens: 508: of the model's 512 positions 4 are left for a prompt; use 504 or less"


@pytest.mark.parametrize("format", ["txt", "json"])
@pytest.mark.parametrize("refused", [True, False])
def test_a_refusal_in_the_final_evaluation_is_told_and_no_success(
    refused: bool, format: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run has one round, so round 1 is the final evaluation. A refusal in round 0 is none in the final evaluation."""
    config = small_config("fedit", rounds=1)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    line = {"event": "refused", "site": "b", "round": int(refused), "reason": WHY, "joining": False}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    results = {"a": {"test/global/dice": 0.5}, "b": {}}
    if refused:
        with pytest.raises(typer.Exit) as ended:
            print_results(results, {}, config, tmp_path, format)
        assert ended.value.exit_code == 1
    else:
        print_results(results, {}, config, tmp_path, format)
    said = capsys.readouterr().out
    assert (WHY in said) is refused
    if format == "txt":
        assert ("refused in the final evaluation" in " ".join(said.split())) is refused
    else:
        assert json.loads(said).get("refused") == ({"b": WHY} if refused else None)


@pytest.mark.parametrize(("tuned", "said"), [(0.51, True), (0.3, True), (0.56, False)])
def test_a_run_at_the_level_of_the_frozen_model_says_what_it_shows(
    tuned: float, said: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small_config("fedit", rounds=2)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    scores = {"test/pretrained/dice": 0.5, "test/global/dice": tuned}
    results = {"a": scores, "b": scores}
    lines = [{"event": "final", "site": site, "round": 2, "metrics": scores} for site in results]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "results.json").write_text(json.dumps(results))
    print_results(results, {}, config, tmp_path, "txt")
    told = " ".join(capsys.readouterr().out.split())
    words = "is at the level of the frozen model, 0.500, after 2 rounds at 64 pixels: this shows that the pipeline runs"
    assert (words in told) is said
    page = run_page(read_run(tmp_path))
    assert ("at the level of the frozen model" in page) is said
