"""Builds a site's client and its guard for a job from data, model, task, privacy plan and records."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from consilium.client.client import Client
from consilium.client.context import ClientContext
from consilium.client.data_parallel import make_data_parallel_group
from consilium.client.evaluator import enable_embedding_cache
from consilium.client.site_data import count_units, ledger_dataset_name, load_site_data, patient_warning, watch_files
from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.core.errors import ConfigError
from consilium.core.messages import Observer, allowed_metrics, loading_event
from consilium.data.datalist import DataList, pool
from consilium.data.patients import warn_of_similar_patients
from consilium.federation.job_assembly import Job, build_model, build_task, checkpoint_of, metric_names
from consilium.privacy.disclosure_control import Terms
from consilium.privacy.guard.guard import Guard
from consilium.privacy.ledger import Ledger
from consilium.privacy.plan import make_plan
from consilium.privacy.secagg.certificates import Identity
from consilium.privacy.secagg.sum_ledger import GENERATED, UNIFORM, SumLedger
from consilium.tasks.base import Task
from consilium.training.device import require_compiler


def build_site(
    job: Job,
    name: str,
    site: SiteConfig,
    folder: Path,
    observer: Observer,
    model: nn.Module | None = None,
    root: Path | None = None,
    data: DataList | None = None,
) -> Client:
    """Return a site's client for a job.

    `folder`: the site's private folder for the job; `root`: its folder for files that outlast jobs, by default `folder`;
    `model`: a model whose frozen base the sites of one process share, by default it is built here; `data`: the same samples
    that the guard counts, by default they are read here. Raises ConfigError or DataError.
    """
    if model is not None and site.base == "sharded":
        raise ConfigError(
            f"{name}: site.yaml: base: 'sharded': the sites of a simulation in one process share their base; "
            "use --engine flare, or replicated"
        )
    if site.threads:
        torch.set_num_threads(site.threads)
    observer(loading_event("data", name))
    data = data or load_site_data(job.config, name, site, folder, root)
    watch = watch_files(job.config, data) if job.config.privacy is not None else None
    # with privacy, decode all samples now, before the budget is charged
    task = build_task(job.config, replace(data, loading=replace(data.loading, decode_all=job.config.privacy is not None)), site)
    if warning := patient_warning(job.config, data):
        observer({"event": "warning", "text": f"{name}: {warning}"})
    warn_of_similar_patients(data.splits)
    if model is None:
        observer(loading_event(job.config.model.title, name))
        model = build_model(job.config, site)
    made = _build_client(job, name, site, folder, observer, model, task, checkpoint_of(job.config.model, site), data)
    made.context.watch = watch
    return made


def build_guard(
    job: Job,
    name: str,
    site: SiteConfig,
    folder: Path,
    root: Path,
    observer: Observer,
    simulated: bool = False,
    job_id: str = "",
    data: DataList | None = None,
    identity: Identity | None = None,
) -> Guard:
    """Return the guard of one site for this job. `root` holds the site's records of all runs and its ledger.

    In a simulation metrics leave unless the site forbids it. Otherwise the metrics of a private job leave only if the site
    allows it. `data`: the samples on which the site trains, which the plan must count; by default they are read here.
    `identity`: key and certificate for secure aggregation.
    """
    data = data or load_site_data(job.config, name, site, folder, root)
    patients, own = ledger_dataset_name(job.config, name, site, data), site.dataset(job.config.data.dataset, name)[1]
    return Guard(
        name,
        job.config,
        job.strategy,
        allowed_metrics(frozenset(metric_names(job.config))),
        site.privacy,
        shares_scores(job.config, site, simulated),
        patients,
        count_units(job.config, data),
        folder,
        root,
        Ledger(site.privacy.ledger_in(root)),
        SumLedger(
            root,
            (patients, str(data.path.resolve())) if own else (GENERATED,),
            job.config.title,
            UNIFORM if job.config.weighting == "uniform" else f"samples, at most {job.config.max_masked_weight}",
        ),
        observer,
        job_id,
        str(data.path) if site.datasets else "",
        Terms(site.share_statistics, site.statistics_minimum),
        tuple(job.initial),
        site.test_only,
        site.share_personalized,
        identity=identity,
    )


def shares_scores(config: JobConfig, site: SiteConfig, simulated: bool = False) -> bool:
    """Return whether scores leave the site: as its site.yaml says, else in simulations and in jobs without privacy."""
    return site.share_metrics if site.share_metrics is not None else simulated or config.privacy is None


def build_pooled_site(
    job: Job, name: str, members: dict[str, SiteConfig], folder: Path, observer: Observer, model: nn.Module
) -> Client:
    """Return the single client of a centralized baseline, which has the pooled data of all `members`."""
    lists = [load_site_data(job.config, member, site, folder.parent / member) for member, site in members.items()]
    first = next(iter(members.values()))
    task = build_task(job.config, pool(lists), first)
    return _build_client(job, name, SiteConfig(), folder, observer, model, task, checkpoint_of(job.config.model, first))


def _build_client(
    job: Job,
    name: str,
    site: SiteConfig,
    folder: Path,
    observer: Observer,
    model: nn.Module,
    task: Task,
    checkpoint: Path | None,
    data: DataList | None = None,
) -> Client:
    units = count_units(job.config, data) if data else task.num_samples
    plan, seed = make_plan(job.config, job.strategy, units, job.initial), site.privacy.noise_seed
    plan = plan.with_seeded_noise([name]) if plan is not None and seed is not None else plan
    for note in getattr(task, "notes", ()):
        observer({"event": "warning", "text": f"{name}: {note}"})
    context = ClientContext(
        name, job.config, job.strategy, model, task, folder, observer, plan, seed, site.capacity, checkpoint, data,
        ranks=make_data_parallel_group(job.config, site, data, folder),
        shares_scores=shares_scores(job.config, site),
    )  # fmt: skip
    if site.base != "sharded":  # its ranks must run the encoder together, so none may skip it
        if job.config.training.compile:
            require_compiler(next(model.parameters()).device)
        enable_embedding_cache(job.config, model, task)
    return Client(context)
