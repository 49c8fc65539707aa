"""A server that has a site delete folders of its kit: FLARE removes KIT/<job id> on deployment and on request."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nvflare.apis.utils.format_check import check_job_id
from nvflare.apis.workspace import Workspace

from consilium.core.errors import ConfigError, Reason
from consilium.federation.run_folders import STATE
from consilium.flare.job import job_context


def test_no_job_id_names_the_folder_of_ledger_and_records() -> None:
    check_job_id("consilium")  # a folder of this name could be deleted
    with pytest.raises(ValueError, match="invalid job_id"):
        check_job_id(STATE)


def test_a_kit_whose_policy_is_gone_runs_nothing(tmp_path: Path) -> None:
    (tmp_path / "startup").mkdir()
    (tmp_path / "startup" / "client.crt").touch()
    (tmp_path / "startup" / "fed_client.json").touch()
    (tmp_path / "local").mkdir()
    fl_ctx: Any = SimpleNamespace(get_engine=lambda: SimpleNamespace(get_workspace=lambda: Workspace(str(tmp_path), "site-1")))
    with pytest.raises(ConfigError, match=r"site\.yaml: missing") as caught:
        job_context.site_config(fl_ctx, "site-1")
    assert caught.value.reason is Reason.POLICY
    for lost in ("", "\n", "# nothing is left\n"):  # a full disk may leave an empty file
        (tmp_path / "local" / "site.yaml").write_text(lost)
        with pytest.raises(ConfigError, match=r"site\.yaml: empty") as caught:
            job_context.site_config(fl_ctx, "site-1")
        assert caught.value.reason is Reason.POLICY
    (tmp_path / "local" / "site.yaml").write_text("{}\n")
    assert not job_context.site_config(fl_ctx, "site-1").privacy.requires_privacy
    (tmp_path / "local" / "site.yaml").write_text("threads: 1\n")
    assert job_context.site_config(fl_ctx, "site-1").threads == 1
