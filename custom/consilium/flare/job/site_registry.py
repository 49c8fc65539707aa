"""This process' sites by job: the guard's filter and the executor of a job share one, made when either first needs it.

The list is read once for guard and site: a ledger that charged another plan than the one that ran would be wrong. Where no site
can be made of what was read, the next task has it read anew, for both.
"""

from pathlib import Path

from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_context import FLContext

from consilium.client.build import build_site
from consilium.client.client import Client
from consilium.client.site_data import site_data
from consilium.core.errors import ConsiliumError, DataError
from consilium.data.datalist import DataList
from consilium.flare.job import job_context

_sites: dict[tuple[str, str], Client] = {}
_read: dict[tuple[str, str], DataList] = {}
_useless: set[tuple[str, str]] = set()
"""Those whose list was read, and no site can be made of it."""


def key(fl_ctx: FLContext) -> tuple[str, str]:
    """Return what things of a job in this process go by: FLARE's id of it, and the site."""
    return fl_ctx.get_job_id(), fl_ctx.get_identity_name()


def read_anew(fl_ctx: FLContext) -> bool:
    """Tell, as a task comes, whether the list was read anew, because no site could be made of it before; if it can be read."""
    if (place := key(fl_ctx)) not in _useless:
        return False
    before = _read.pop(place)
    try:
        data(fl_ctx)
    except ConsiliumError:  # then who counts by what was read before can still repeat what has left
        _read[place] = before
        return False
    _useless.remove(place)
    return True


def data(fl_ctx: FLContext) -> DataList:
    """Return the site's samples. Raises ConsiliumError."""
    if (place := key(fl_ctx)) not in _read:
        job, site = job_context.approved(fl_ctx, name := fl_ctx.get_identity_name())
        _read[place] = site_data(job.config, name, site, _folder(fl_ctx), job_context.site_root(fl_ctx, job, name, site))
    return _read[place]


def _folder(fl_ctx: FLContext) -> Path:
    job, site = job_context.approved(fl_ctx, name := fl_ctx.get_identity_name())
    return job_context.former_site(fl_ctx, job, name, site) or job_context.site_folder(fl_ctx, job, name, site)


def ready(component: FLComponent, fl_ctx: FLContext) -> Client:
    """Return the site, its data and weights read. Raises ConsiliumError where it cannot be made; `component` logs meanwhile."""
    if (place := key(fl_ctx)) not in _sites:
        job, site = job_context.approved(fl_ctx, name := fl_ctx.get_identity_name())
        observer = job_context.observer(component, fl_ctx, name, job.config.privacy is not None)
        root = job_context.site_root(fl_ctx, job, name, site)
        read = data(fl_ctx)
        try:
            _sites[place] = build_site(job, name, site, _folder(fl_ctx), observer, root=root, data=read)
        except DataError:
            _useless.add(place)
            raise
    return _sites[place]


def close(fl_ctx: FLContext) -> None:
    """End the site's other processes, and forget it."""
    _read.pop(key(fl_ctx), None)
    _useless.discard(key(fl_ctx))
    if (site := _sites.pop(key(fl_ctx), None)) is not None:
        site.close()
