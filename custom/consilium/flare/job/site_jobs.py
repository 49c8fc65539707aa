"""The state of each site's job in this process. The guard's filters and the executor share it.

Guard and executor use the same reading of the data list, so that the privacy ledger charges the plan that runs. If no site can
be built from the list, the next task reads the list again for both.
"""

from dataclasses import dataclass
from pathlib import Path

from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable

from consilium.client.approval import check_approved
from consilium.client.build import build_guard, build_site
from consilium.client.client import Client
from consilium.client.site_data import load_site_data
from consilium.config.job import load_job
from consilium.config.site import SiteConfig, allowed_plugins
from consilium.core.errors import ConsiliumError, DataError
from consilium.data.datalist import DataList
from consilium.federation.job_assembly import Job, assemble_job
from consilium.flare.job import job_context
from consilium.flare.job.simulation_settings import is_simulated_process
from consilium.privacy.guard.guard import Guard


@dataclass
class SiteJob:
    """A job at a site. `unusable`: the data list was read, but no site could be built from it.

    `sent`: the last message that the guard built. `refused`: the refusal that replaced the last refused task. The second pair
    of filters lets exactly these objects pass, see filters.py.
    """

    approved: tuple[Job, str, SiteConfig] | None = None
    data: DataList | None = None
    unusable: bool = False
    site: Client | None = None
    guard: Guard | None = None
    sent: Shareable | None = None
    refused: Shareable | None = None


jobs: dict[tuple[str, str], SiteJob] = {}
"""The states by (FLARE's job id, site name)."""


def site_job_state(fl_ctx: FLContext) -> SiteJob:
    """Return the state of the job and site that FLARE's context names."""
    return jobs.setdefault((fl_ctx.get_job_id(), fl_ctx.get_identity_name()), SiteJob())


def approved_job(fl_ctx: FLContext) -> tuple[Job, str, SiteConfig]:
    """Return (this run's job, the site's name, its settings) if the site's administrator has approved the job where needed.

    They are read once per process. So guard and executor use the same values, even if FLARE rewrites the job's folder while the
    job runs. Raises ConfigError, and RefusedError if the site's administrator must approve the job first.
    """
    state = site_job_state(fl_ctx)
    if state.approved is None:
        name, folders = fl_ctx.get_identity_name(), job_context.workspace(fl_ctx)
        site, app = job_context.site_config(fl_ctx, name), Path(folders.get_app_dir(fl_ctx.get_job_id()))
        path = app / "config" / "job.yaml"
        config = load_job(path, plugins=allowed_plugins(site, is_simulated_process()))
        check_approved(app, config, site, Path(folders.get_site_config_dir()))
        state.approved = job_context.check_federated(assemble_job(config, path), path), name, site
    return state.approved


def reload_unusable_data(fl_ctx: FLContext) -> None:
    """Read the data list again if no site could be built from it, and discard the guard, so that it is built again.

    This is called when a task arrives. If the list cannot be read now, the former list and guard stay, so that the guard can
    still repeat a reply.
    """
    state = site_job_state(fl_ctx)
    if state.unusable:
        former, state.data = state.data, None
        try:
            data(fl_ctx)
        except ConsiliumError:
            state.data = former
        else:
            state.unusable, state.guard = False, None


def data(fl_ctx: FLContext) -> DataList:
    """Return the site's samples, which are read at the first call. Raises ConsiliumError."""
    state = site_job_state(fl_ctx)
    if state.data is None:
        job, name, site = approved_job(fl_ctx)
        state.data = load_site_data(job.config, name, site, _folder(fl_ctx), job_context.site_root(fl_ctx, job, name, site))
    return state.data


def _folder(fl_ctx: FLContext) -> Path:
    found = approved_job(fl_ctx)
    return job_context.former_site_folder(fl_ctx, *found) or job_context.open_site_folder(fl_ctx, *found)


def built_client(component: FLComponent, fl_ctx: FLContext) -> Client:
    """Return the site with its data and weights, built at the first call. `component` logs its events.

    Raises ConsiliumError if it cannot be built.
    """
    state = site_job_state(fl_ctx)
    if state.site is None:
        job, name, site = approved_job(fl_ctx)
        observer = job_context.observer(component, fl_ctx, name, job.config.privacy is not None)
        root, samples = job_context.site_root(fl_ctx, job, name, site), data(fl_ctx)
        try:
            state.site = build_site(job, name, site, _folder(fl_ctx), observer, root=root, data=samples)
        except DataError:
            state.unusable = True
            raise
    return state.site


def guard(component: FLComponent, fl_ctx: FLContext) -> Guard:
    """Return the site's guard, built at the first call. `component` logs its events.

    Raises ConsiliumError if it cannot be built.
    """
    state = site_job_state(fl_ctx)
    if state.guard is None:
        job, name, site = approved_job(fl_ctx)
        job_context.set_upload_timeout(fl_ctx, job)
        folder, root = job_context.open_site_folder(fl_ctx, job, name, site), job_context.site_root(fl_ctx, job, name, site)
        observe = job_context.observer(component, fl_ctx, f"{name}-guard", job.config.privacy is not None)
        job_id, samples = fl_ctx.get_job_id() or "", data(fl_ctx)
        identity = job_context.secagg_identity(fl_ctx, name, site) if job.config.secure_aggregation else None
        made = build_guard(job, name, site, folder, root, observe, is_simulated_process(), job_id, samples, identity)
        made.ready = lambda: built_client(component, fl_ctx).prepare_round()
        state.guard = made
    return state.guard


def close(fl_ctx: FLContext) -> None:
    """End the site's worker processes, and drop the site and its data."""
    state = site_job_state(fl_ctx)
    site, state.site, state.data, state.unusable = state.site, None, None, False
    if site is not None:
        site.close()
