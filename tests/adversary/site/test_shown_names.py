"""Names, reasons and scores that another party chose, in every table and page: they are shown, and do nothing."""

import io
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from typer.testing import CliRunner

from consilium.cli import data_lists, jobs as cli_jobs, main as cli, site_records as cli_audit
from consilium.core.errors import ConfigError
from consilium.core.messages import Payload
from consilium.core.sanitize import markdown_cell, rich_line, shown, tensorboard_tag
from consilium.data.check_report import Findings
from consilium.privacy import audit_log
from consilium.report import live_view
from consilium.report.live_view import LiveView
from consilium.report.results_table import results_table
from consilium.report.run_files import RunLog
from consilium.report.tables import terminal_table
from tests.conftest import small_config
from tests.report.shown_scores import DICE

HOSTILE = (
    "\x1b]0;owned\x07\x1b[2J\rsite\n# Title\n| a | b |\n<script>x()</script> [red]no[/red] [x](http://e) `rm` "
    "\u202egnp.exe :skull:"
)
FORBIDDEN = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def check(text: str, markdown: bool = False) -> None:
    """Fail if the text holds more than visible characters and our own line ends, or lost what it shows."""
    assert not FORBIDDEN.search(text)
    assert "owned" in text
    joined = re.sub(r"\s+", "", text)
    assert ("[red]no[/red]" in joined) != markdown
    assert ":skull:" in joined
    assert "\n#Title" not in text
    assert not re.search(r"^(# Title|\| a \|)", text, re.MULTILINE)
    if markdown:
        assert "<script" not in text


def printed(*values: Any, width: int = 400) -> str:
    console = Console(file=io.StringIO(), width=width)
    for value in values:
        console.print(value)
    return console.file.getvalue()


def test_the_functions_that_clean() -> None:
    check(shown(HOSTILE))
    check(printed(rich_line(HOSTILE)))
    check(markdown_cell(HOSTILE), markdown=True)
    assert shown("Ärztin 1, 北京 (ok)") == "Ärztin 1, 北京 (ok)"
    assert shown("a\x1b[0m\tb\udc80") == r"a\x1b[0m\tb\udc80"
    assert shown("a\u00a0b\u3000c\u2007d") == "a b c d"
    assert shown("a\u3164\uffa0b\u2800\u034f\ufe0f") == r"a\u3164\uffa0b\u2800\u034f\ufe0f"
    assert shown("x" * 10**7, 10) == "xxxxxxxxxx... (10000000 characters)"
    assert markdown_cell("a|b`c`<i>#[d](e)\\&\n") == r"a\|b\`c\`&lt;i&gt;\#\[d\](e)\\&amp;" + "\\\\n"
    assert tensorboard_tag("../../x/\x1b/.y") == "_/_/x/_x1b/_y"


def found(tmp_path: Path) -> dict[str, Any]:
    """Return a job's status in which every text is hostile."""
    site = {"round": 0, "weight": 3, "share": 0.5, "bytes_up": 1, "bytes_down": 2, "metrics": {"test/global/dice": 1e300}}
    refusal = {"round": 0, "joining": False, "site": HOSTILE, "reason": HOSTILE}
    told = {"finished": False, "round": 0, "rounds": 2, "phase": 0, "answered": [], "asked": [HOSTILE], "epsilon": None}
    told |= {
        "eta_seconds": None,
        "sites": {HOSTILE: site},
        "refused": [refusal],
        "scores": {"leading": ["dice"], "headings": {"dice": HOSTILE}},
    }
    return {
        "experiment": HOSTILE,
        "status": HOSTILE,
        "job_id": HOSTILE,
        "problems": [HOSTILE],
        "reason": HOSTILE,
        "progress": told,
    }


def test_status(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    cli_jobs.show(cli_jobs.status_lines(found(tmp_path)))
    text = capsys.readouterr().out
    check(text)
    assert text.count("owned") == 10
    assert max(map(len, text.splitlines())) < 700  # a number of 300 digits is not written out
    one = {k: HOSTILE for k in ("experiment", "status", "submit_time_iso", "duration", "submitter_name", "job_id")}
    cli_jobs.show(cli_jobs._job_list_lines([one]))
    check(capsys.readouterr().out)


def test_the_live_view_and_the_closing_table(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=400)
    with LiveView(console, 2, HOSTILE, DICE) as view:
        view({"event": "round", "round": 0, "phase": 0, "phases": 1, "sites": [HOSTILE]})
        view({"event": "privacy", "claim": HOSTILE, "warnings": [HOSTILE]})
        view({"event": "refused", "site": HOSTILE, "round": 0, "joining": False, "reason": HOSTILE})
        metrics = {"validation/global/dice": 0.5, "train/loss": 0.5}
        view({"event": "metrics", "site": HOSTILE, "round": 0, "metrics": metrics})
        check(printed(view.render()))
    check(console.file.getvalue())
    check(printed(terminal_table(results_table({HOSTILE: {"test/pretrained/dice": 0.5}}, DICE, HOSTILE), 120)))


def test_the_page_of_an_audit(tmp_path: Path) -> None:
    line = {"site": HOSTILE, "job": HOSTILE, "experiment": HOSTILE, "run": HOSTILE, "kind": HOSTILE}
    tensor = {HOSTILE: {"shape": [1], "dtype": "float32", "bytes": 4, "norm": 1.0}}
    beside = {"round": 0, "phase": 0, "tensors": tensor, "scalars": {HOSTILE: 1.0}, "metrics": {HOSTILE: HOSTILE}}
    beside["values"] = {"huge": 10**400, "nan": float("nan"), "nested": {HOSTILE: [HOSTILE]}, "flag": True, "count": 12345}
    audit_log.AuditLog(tmp_path / audit_log.FILE).add(line | beside)
    audit_log.AuditLog(tmp_path / audit_log.FILE).add(line | {"reason": HOSTILE})
    page = cli_audit.markdown(audit_log.read_with_epsilon(tmp_path / audit_log.FILE))
    check(page, markdown=True)
    titles = ["### Messages that left this site", "### Tensors that left, as sent", "### Values that left beside tensors"]
    assert [x for x in page.splitlines() if x.startswith("#")] == [page.splitlines()[0], *titles]
    rows = [x for x in page.splitlines() if x.startswith("|")]
    columns = [len(re.findall(r"(?<!\\)\|", row)) for row in rows]
    assert columns == [9] * 4 + [6] * 3 + [4] * 8  # no row has grown


def test_what_is_wrong_is_said_in_visible_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with patch.object(cli, "app", side_effect=ConfigError(f"job.yaml: {HOSTILE}")), pytest.raises(SystemExit):
        cli.main()
    text = capsys.readouterr().err
    assert not FORBIDDEN.search(text)
    assert "[red]no[/red]" in text


def test_the_report_on_a_data_list(capsys: pytest.CaptureFixture[str]) -> None:
    found = Findings(HOSTILE, {HOSTILE: 1})
    found.images_of_class[HOSTILE] = Counter({"training": 1})
    found.add_problem(HOSTILE, HOSTILE)
    found.add_warning(HOSTILE, HOSTILE)
    every, shared = {HOSTILE: found.to_dict(), "two": found.to_dict()}, {HOSTILE: {"count": 1, "first": [HOSTILE]}}
    cli_jobs.show(data_lists._check_lines(every, shared, [HOSTILE], Path(HOSTILE)))
    check(capsys.readouterr().out)


def test_tensorboard_and_the_record(tmp_path: Path) -> None:
    config = small_config("fedit")
    log = RunLog(tmp_path, config)
    log.record_run_start(config.strategy, {})
    log.record_result("site-1", Payload(0, 0, {}, metrics={HOSTILE: 0.5, "../../../up": 0.5, "validation/global/dice": 0.5}))
    log.record("refused", site=HOSTILE, round=0, reason=HOSTILE, joining=False)
    log.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    assert len(text.splitlines()) == 3
    assert not FORBIDDEN.search(text)
    assert json.loads(text.splitlines()[2])["reason"] == HOSTILE
    seen = EventAccumulator(str(tmp_path / "tb_events" / "site-1")).Reload().Tags()["scalars"]
    assert "validation/global/dice" in seen
    assert not any(FORBIDDEN.search(name) or ".." in name or "<" in name for name in seen)
    assert live_view.progress(tmp_path)["refused"][0]["site"] == HOSTILE  # programs get it as it came


def test_json_for_programs_stays_json_in_a_terminal(tmp_path: Path) -> None:
    audit_log.AuditLog(tmp_path / audit_log.FILE).add({"kind": HOSTILE})
    out = CliRunner().invoke(cli.app, ["audit", str(tmp_path), "--format", "json"]).stdout
    assert not FORBIDDEN.search(out)
    assert json.loads(out)[0]["messages"][0]["kind"] == HOSTILE
