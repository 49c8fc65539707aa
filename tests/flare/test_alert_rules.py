"""The alerting rules as Prometheus' own `promtool` reads and evaluates them, where it is installed."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

ALERTS = Path(__file__).parents[2] / "provisioning/alerts.yml"
PROMTOOL = shutil.which("promtool")
RULES: dict[str, dict[str, Any]] = {
    rule["alert"].removeprefix("Consilium"): rule for rule in yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
}
HOUR, DAY = 60, 1440
"""Minutes: promtool's time begins at 0, and the rules are evaluated every minute."""
LAST = "consilium_run_last_event_timestamp_seconds"


class Case(NamedTuple):
    """An alert with the series it is evaluated on, in promtool's notation: values of one minute each.

    `labels`: of the alert that fires. `quiet`, `fires`: minutes at which it does not fire and fires. `value`: the text of
    {{ $value }}.
    """

    alert: str
    series: dict[str, str]
    labels: dict[str, str]
    quiet: list[int]
    fires: list[int]
    value: str = ""


LATER = [2 * DAY, 10 * DAY, 25 * DAY]
SEEN, STATE, IDS = "consilium_run_site_last_seen_timestamp_seconds", "consilium_run_state", 'run="r",instance="hub"'
RUN, SITE = {"run": "r", "instance": "hub"}, {"site": "a", "instance": "hub"}
CASES = [
    Case("CertificateEnds", {'consilium_certificate_days_left{of="root"}': "60x9 59x10"}, {"of": "root"}, [9], [10], "59"),
    Case("CertificateEndsSoon", {'consilium_certificate_days_left{of="root"}': "14x9 13x10"}, {"of": "root"}, [9], [10], "13"),
    Case("DiskFull", {"consilium_disk_free_bytes": "5e9x9 4999999999x30"}, {}, [9, 19], [20]),
    Case(
        "RunStands",
        {f'{LAST}{{run="r",instance="hub"}}': "0x200", 'consilium_run_state{run="r",instance="hub",state="running"}': "1x130"},
        RUN,
        [120, 140],  # two hours, and after the process has ended
        [121],
    ),
    Case(
        "RunLost",
        {
            f'{LAST}{{run="r",instance="hub"}}': "0x2000",
            'consilium_run_state{run="r",instance="hub",state="lost"}': "_x10 1x2000",
        },
        RUN,
        [9, 14, DAY],
        [15, DAY - 1],
    ),
    Case(
        "RunLost",  # of the server that has it
        {f'{LAST}{{run="r",instance="hub"}}': "0x99", 'consilium_run_state{run="r",instance="other",state="lost"}': "1x99"},
        RUN,
        [20],
        [],
    ),
    Case(
        "RunStopped",
        {
            'consilium_run_end_timestamp_seconds{run="r",instance="hub"}': "0x2000",
            'consilium_run_stopped{run="r",instance="hub",cause="no room"}': "1x2000",
        },
        RUN | {"cause": "no room"},
        [DAY],
        [0, DAY - 1],
    ),
    Case(
        "RunStopped",  # a person's abort is no fault
        {
            'consilium_run_end_timestamp_seconds{run="r",instance="hub"}': "0x200",
            'consilium_run_stopped{run="r",instance="hub",cause="aborted by lead@hub.example in round 2"}': "1x200",
        },
        RUN | {"cause": "aborted"},
        [0, 10],
        [],
    ),
    Case(
        "SiteRefused",  # the hub's own act, as for a site that has left
        {'consilium_refused{site="a",instance="hub",cause="revoked"}': "_x100 1x2000"},
        SITE | {"cause": "revoked"},
        [104, DAY + 101],
        [105, DAY + 98],
    ),
    Case(
        "SiteRefused",
        {'consilium_refused{site="a",instance="hub",cause="revoked"}': "1x36100"},
        SITE | {"cause": "revoked"},
        LATER,
        [],
    ),
    Case(
        "SiteRefused",
        {'consilium_refused{site="a",instance="hub",cause="ended"}': "1x36100"},
        SITE | {"cause": "ended"},
        [],
        LATER,
    ),
    Case("SiteUnwell", {'consilium_site_data_readable{site="a",instance="hub"}': "1x9 0x40"}, SITE, [9, 39], [40]),
    Case("SiteUnwell", {'consilium_site_disk_free_bytes{site="a",instance="hub"}': "5e9x9 1e9x40"}, SITE, [9, 39], [40]),
    Case(
        "SiteSilent",
        {f'{SEEN}{{site="a",run="r",instance="hub"}}': "0x2000", f'{STATE}{{{IDS},state="running"}}': "1x2000"},
        SITE | RUN,
        [DAY],
        [DAY + 1],
    ),
    Case(
        "SiteSilent",  # the run has ended
        {
            f'{SEEN}{{site="a",run="r",instance="hub"}}': "0x36100",
            f'{STATE}{{{IDS},state="running"}}': "1x99",
            f'{STATE}{{{IDS},state="completed"}}': "_x99 1x36000",
        },
        SITE | RUN,
        LATER,
        [],
    ),
    Case(
        "SiteSilent",  # it was revoked, and the run goes on without it
        {
            f'{SEEN}{{site="a",run="r",instance="hub"}}': "0x36100",
            f'{STATE}{{{IDS},state="running"}}': "1x36100",
            'consilium_refused{site="a",instance="hub",cause="revoked"}': "1x36100",
        },
        SITE | RUN,
        LATER,
        [],
    ),
    Case(
        "Refusals",
        {'consilium_run_refusals_total{run="r",site="a"}': "0x9 1x9 2x9 3x9 4x9"},
        {"run": "r", "site": "a"},
        [9, 39],
        [46],
    ),
    Case(
        "BudgetLow",
        {
            'consilium_epsilon_left{dataset="ward",unit="site"}': "0.5x9 0.4x9",
            'consilium_epsilon_spent{dataset="ward",unit="site"}': "4.5x9 4.6x9",
        },
        {"dataset": "ward", "unit": "site"},
        [9],
        [10],
    ),
    Case("LedgerBroken", {"consilium_ledger_intact": "1x9 0x9"}, {}, [9], [10]),
    Case("LedgerBroken", {'consilium_record_intact{run="r"}': "1x9 0x9"}, {"run": "r"}, [9], [10]),
    Case("MetricsOld", {"consilium_written_timestamp_seconds": "0x200"}, {}, [HOUR], [HOUR + 1]),
]


def rendered(case: Case) -> dict[str, Any]:
    """Return the alert of a case as it fires, with the text that people read."""
    rule = RULES[case.alert]
    text = re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda found: case.labels[found[1]], rule["annotations"]["summary"])
    text = text.replace("{{ $value }}", case.value)
    return {"exp_labels": rule["labels"] | case.labels, "exp_annotations": {"summary": text}}


def test_every_alert_has_a_case_that_fires_and_texts_name_labels_it_has() -> None:
    assert {case.alert for case in CASES if case.fires and case.quiet} == RULES.keys()
    assert not any("{{" in rendered(case)["exp_annotations"]["summary"] for case in CASES)


@pytest.mark.skipif(PROMTOOL is None, reason="needs promtool, of Debian's package prometheus")
def test_promtool_reads_the_rules_and_they_fire_when_they_should(tmp_path: Path) -> None:
    tests = [
        {
            "interval": "1m",
            "input_series": [{"series": name, "values": values} for name, values in case.series.items()],
            "alert_rule_test": [
                {"eval_time": f"{minute}m", "alertname": f"Consilium{case.alert}", "exp_alerts": expected}
                for minutes, expected in ((case.quiet, []), (case.fires, [rendered(case)]))
                for minute in minutes
            ],
        }
        for case in CASES
    ]
    files = {"1m": tmp_path / "tests.yml", "1h": tmp_path / "later.yml"}  # 25 days take a minute each by the minute
    for every, path in files.items():
        some = [
            one for case, one in zip(CASES, tests, strict=True) if (every == "1h") == (LATER[-1] in case.quiet + case.fires)
        ]
        path.write_text(json.dumps({"rule_files": [str(ALERTS)], "evaluation_interval": every, "tests": some}))
    for words in (["check", "rules", ALERTS], *(["test", "rules", path] for path in files.values())):
        done = subprocess.run([str(PROMTOOL), *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "SUCCESS" in done.stdout
