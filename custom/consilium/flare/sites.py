"""This process' sites by job: the guard's filter and the executor of a job share one, made when either first needs it."""

from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_context import FLContext

from consilium.federation.build import build_site
from consilium.federation.site import Site
from consilium.flare import context

_sites: dict[tuple[str, str], Site] = {}


def key(fl_ctx: FLContext) -> tuple[str, str]:
    """Return what things of a job in this process go by: FLARE's id of it, and the site."""
    return fl_ctx.get_job_id(), fl_ctx.get_identity_name()


def ready(component: FLComponent, fl_ctx: FLContext) -> Site:
    """Return the site, its data and weights read. Raises ConsiliumError where it cannot be made; `component` logs meanwhile."""
    if (place := key(fl_ctx)) not in _sites:
        job, site = context.approved(fl_ctx, name := fl_ctx.get_identity_name())
        folder = context.former_site(fl_ctx, job, name, site) or context.site_folder(fl_ctx, job, name, site)
        root = context.site_root(fl_ctx, job, name, site)
        _sites[place] = build_site(job, name, site, folder, context.observer(component, fl_ctx, name), root=root)
    return _sites[place]


def close(fl_ctx: FLContext) -> None:
    """End the site's other processes, and forget it."""
    if (site := _sites.pop(key(fl_ctx), None)) is not None:
        site.close()
