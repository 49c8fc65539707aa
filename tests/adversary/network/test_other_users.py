"""Another user of a participant's machine reads files: nothing that the server or a site keeps is open to him.

So nobody who comes in over the network as somebody else reads it either.
"""

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from nvflare.apis.fl_context import FLContext
from nvflare.apis.workspace import Workspace

from consilium.client.build import build_guard, build_site
from consilium.client.site_data import load_site_data
from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.core.messages import Kind
from consilium.core.storage import PUBLIC, write_atomic
from consilium.federation.job_assembly import assemble_job
from consilium.federation.run_folders import STATE
from consilium.flare.job import job_context
from consilium.runtime.engine import LocalTransport
from consilium.runtime.run_loop import RunLoop
from consilium.runtime.worker_pool import SimulatedSite
from consilium.server.coordinator import Coordinator
from tests.adversary.network.modes import open_to_others
from tests.conftest import small_config


@pytest.fixture(autouse=True)
def _usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def place(tmp_path: Path) -> FLContext:
    (tmp_path / "startup").mkdir()
    (tmp_path / "local").mkdir()
    workspace = Workspace(str(tmp_path))
    meta = Path(workspace.get_job_meta_path("job-1"))
    meta.parent.mkdir(parents=True, exist_ok=True)
    meta.write_text(json.dumps({"submitter_name": "ann"}))
    fl_ctx = FLContext()
    fl_ctx.get_job_id = lambda: "job-1"
    fl_ctx.get_engine = lambda: SimpleNamespace(get_workspace=lambda: workspace)
    return fl_ctx


def test_nothing_a_server_or_a_site_keeps_is_open_to_other_users(tmp_path: Path) -> None:
    """State, ledger, record, log, TensorBoard, adapters and plots of a whole private run, with the umask most machines have."""
    raw = small_config("fedit", rounds=1, local_steps=1).model_dump()
    raw["federation"]["min_sites"] = 1
    raw["privacy"] = {"unit": "site", "noise_multiplier": 3.0, "clip": 0.5, "trust": "local"}
    job, site = assemble_job(JobConfig.model_validate(raw)), SiteConfig(state=tmp_path / "new" / "state")
    fl_ctx = place(tmp_path)
    server = Coordinator(job, job_context.open_server_folder(fl_ctx, job), lambda event: None)
    folder, root = job_context.open_site_folder(fl_ctx, job, "a", site), job_context.site_root(fl_ctx, job, "a", site)
    guard = build_guard(job, "a", site, folder, root, lambda event: None)
    member = SimulatedSite(build_site(job, "a", site, folder, lambda event: None), guard)
    server.welcome(member.ask(Kind.HELLO, server.run))
    RunLoop(server, LocalTransport(server, {"a": member})).run_phase()
    server.accept_final("a", member.ask(Kind.EVALUATE, server.run, server.start_final_evaluation()["a"]))
    server.finish()
    server.close()
    names = {p.name for root in (tmp_path / STATE, site.state) for p in root.rglob("*") if p.is_file()}
    assert names >= {"ledger.sqlite", "audit.jsonl", "state.safetensors", "released.safetensors", "metrics.jsonl", "owner.json"}
    assert open_to_others(tmp_path / STATE) == []
    assert open_to_others(tmp_path / "new") == []


def test_a_run_in_one_process_is_closed_at_its_folder(tmp_path: Path) -> None:
    folder, job = tmp_path / "runs" / "mine", assemble_job(small_config("fedit"))
    load_site_data(job.config, "a", SiteConfig(), folder / "sites" / "a")  # a simulation first generates the sites' data
    Coordinator(job, folder, lambda event: None).close()
    for one in (folder, folder / "sites", folder / "sites" / "a"):
        assert one.stat().st_mode & 0o077 == 0


def test_what_a_former_version_left_open_is_closed_at_the_next_run(tmp_path: Path) -> None:
    old = tmp_path / STATE / "runs"
    old.mkdir(parents=True)
    (tmp_path / STATE / "ledger.sqlite").touch()
    job_context.open_server_folder(place(tmp_path), assemble_job(small_config("fedit")))
    assert (tmp_path / STATE).stat().st_mode & 0o077 == 0
    assert old.stat().st_mode & 0o077 == 0


def test_a_file_is_never_open_while_it_is_written(tmp_path: Path) -> None:
    """A mode that is set after writing leaves a moment; an old temporary file would lend its mode."""
    (left := tmp_path / f".state-{threading.get_ident()}.{os.getpid()}").touch(0o666)
    left.chmod(0o666)
    write_atomic(tmp_path / "state", b"x")
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o600
    assert not left.exists()
    write_atomic(tmp_path / "datalist.json", b"{}", PUBLIC)
    assert (tmp_path / "datalist.json").stat().st_mode & 0o777 == 0o644
