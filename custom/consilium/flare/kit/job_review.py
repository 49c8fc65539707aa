"""The review of a job before its approval at a site: what the job would do there, and whether the site would refuse it.

`consilium approve` shows it. The review asks the site's own guard, with the site's data list and ledger, as a new run of the
job would. It writes nothing to the ledger and the records.
"""

import json
import tempfile
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unicodedata import bidirectional

from nvflare.apis.job_def import JobMetaKey
from rich.cells import cell_len

from consilium.client import approval
from consilium.client.approval import JOB, other_files
from consilium.client.build import build_guard, shares_scores
from consilium.config.job import JobConfig, load_job
from consilium.config.site import SiteConfig, allowed_plugins, load_kit_site, load_site
from consilium.core.errors import ConfigError, ConsiliumError, Reason
from consilium.core.messages import Kind
from consilium.core.sanitize import count_with_noun, shown
from consilium.core.storage import checkpoint_hash, read_json
from consilium.federation.job_assembly import Job, assemble_job, checkpoint_of
from consilium.federation.run_folders import records_folder
from consilium.flare.job.job_context import check_federated
from consilium.flare.kit.kit_reader import kit_name, kit_role, participant_role, private_key_path, read_settings
from consilium.privacy.accounting import epsilon_for
from consilium.privacy.guard.guard import Guard
from consilium.privacy.guard.task_schedule import site_run_id
from consilium.privacy.plan import Plan, make_plan
from consilium.privacy.secagg.certificates import Identity, read_identity
from consilium.report.tables import only_true
from consilium.strategies.strategy import Role

WIDTH, MARGIN = 80, 11
"""Characters of a line of the review, and of the names at its left."""
UNSUBMITTED = "not known: this folder was not submitted. The site checks the person when the job comes"


@dataclass(frozen=True)
class Cost:
    """What the job would spend at the site. `plan`: None without privacy; `budgets`: per unit with a budget in site.yaml.

    A budget has the keys spent, after, budget (all epsilon) and delta. `after` is infinite if the job bounds no cost for the
    unit. `dataset`: the name of the data in the ledger, "" if it has none; `generated`: the job generates the data; `samples`:
    the training samples or patients of the site; `shown_samples`: the number of them that the server is shown.
    """

    dataset: str
    generated: bool
    samples: int
    shown_samples: int
    plan: Plan | None
    budgets: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Review:
    """The review of a job. `cost`: None if the site's data or ledger cannot be read; `refusal`: "" if the site would run it.

    `submitter`: the person as the server has named them; "" for a folder that did not come from a server.
    """

    job: Job
    site: SiteConfig
    app: Path
    digest: str
    submitter: str
    cost: Cost | None
    refusal: str
    approved: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values: the job, and the rows of the review by name."""
        rows: dict[str, list[str]] = {}
        for name, text in self._rows():
            rows.setdefault(name, []).append(text)
        job = self.job.config.model_dump(mode="json", exclude_none=True)
        return {"job": job, "review": rows, "refusal": self.refusal or None, "digest": self.digest}

    def lines(self, width: int = WIDTH) -> Iterator[str]:
        """Yield the review for a person, in lines of at most `width` columns, WIDTH at most, or one longer word.

        Only the first line of a row begins at the left. A word stays whole, so that a path can be copied. It contains no
        blanks, so that its end on the terminal's next line does not look like a row. Control characters in the job's texts, and
        characters without a width or from right to left, are escaped.
        """
        before = ""
        for name, text in self._rows():
            line = f"{'' if name == before else name:<{MARGIN}}"
            visible = ""
            for c in shown(text, 600):
                is_plain = c.isascii() or (bidirectional(c) not in ("R", "AL", "AN") and cell_len(c) > 0)
                visible += c if is_plain else ascii(c)[1:-1]
            for word in visible.split():
                if len(line) > MARGIN and cell_len(f"{line} {word}") > min(width, WIDTH):
                    yield line
                    line = " " * MARGIN
                line += word if len(line) == MARGIN else f" {word}"
            yield line
            before = name

    def _rows(self) -> Iterator[tuple[str, str]]:
        config = self.job.config
        if config.cross_site is not None:
            work = f"scores the models of run {config.cross_site.run}, no training"
        elif config.trains:
            rounds = count_with_noun(config.training.rounds, "round")
            work = f"{rounds} of training{', statistics first' if config.statistics else ''}"
        else:
            work = "statistics only, no training"
        yield "job", f"{config.name}: {config.strategy.name}, {work}"
        yield "from", self.submitter or UNSUBMITTED
        kinds = f"{config.model.title.removeprefix('model ')}; {config.task.name}; adapter {config.adapter.kind}"
        checkpoint = config.model.checkpoint  # at the end, because it may have any text and any length
        yield "model", f"{kinds}; {f'checkpoint {checkpoint}' if checkpoint else 'without a checkpoint'}"
        if (cost := self.cost) is None:
            yield "data", "not read, see below"
        else:
            is_by_patient = config.privacy is not None and config.privacy.unit == "patient"
            samples = count_with_noun(cost.samples, "patient" if is_by_patient else "training sample")
            counted = f"; counted as {cost.dataset}" if cost.dataset else ""
            generated = f"generated by the job, {samples}; none of yours{counted}"
            yield "data", generated if cost.generated else f"{cost.dataset}, {samples}"
        yield "privacy", _privacy_text(self.job, cost)
        yield from (("budget", text) for text in _budget_texts(self.site, cost))
        yield from (("leaves", text) for text in _sent_lines(self.job, self.site, cost))
        files = other_files(self.app)
        yield from only_true(
            {
                ("code", "none: the job is configuration only"): not files and not config.packages,
                (
                    "code",
                    f"UNUSUAL: {count_with_noun(len(files), 'file')} besides the configuration: {json.dumps(files)}",
                ): files,
            }
        )
        plugin = "installed here; the digest covers its code"
        yield from (("code", f"plug-in {package} {version}, {plugin}") for package, version in config.packages.items())
        yield "settings", f"all of them: {self.app / JOB}"
        yield "digest", self.digest
        yield from only_true(
            {
                ("approved", f"already, {self.approved.get('time')}, by {self.approved.get('by')}"): self.approved,
                ("note", "site.yaml has no `approve: digest`, so every job runs here without an approval"): (
                    self.site.approve is None
                ),
                ("REFUSED", f"Even if you approve it, this site would refuse the job now: {self.refusal}"): self.refusal,
            }
        )


def review(app: Path, kit: Path) -> Review:
    """Return the review of the job in the folder `app` at the site with this kit. Raises ConfigError if it is no job."""
    local = kit / "local"
    if not local.is_dir() or participant_role(kit) not in (None, "site"):
        raise ConfigError(f"--kit: {kit}: is not a site's startup kit; give the folder that has startup/ and local/")
    site = load_site(local / "site.yaml") if (local / "site.yaml").is_file() else SiteConfig()
    config = load_job(app / JOB, plugins=allowed_plugins(site))
    digest = approval.digest(app, config)
    job = check_federated(assemble_job(config, app / JOB), app / JOB)
    name = kit_name(kit) if kit_role(kit) == "site" else kit.resolve().name
    identity, root, cost, refusal = _identity(config, site, kit, name), records_folder(kit, site.state), None, ""
    with tempfile.TemporaryDirectory(prefix="consilium-approve-") as folder:  # for data that the job has generated
        try:
            if kit_role(kit) == "site":
                load_kit_site(local / "site.yaml")
            guard = build_guard(job, name, site, Path(folder), root, lambda event: None, identity=identity)
            run = uuid.uuid4().hex  # a new run, of which the ledger has no rows
            cost = _cost(guard, site_run_id(name, run, config.digest, ""), site.dataset(config.data.dataset, name)[1] is None)
            guard.authorize(Kind.HELLO, run)  # the first tasks of a run
            if config.statistics is not None and config.cross_site is None:
                guard.authorize(Kind.STATISTICS, run)
            guard.end_task()
            _check_checkpoint(config, site)
        except (ConsiliumError, OSError) as error:
            refusal = " ".join(str(error).split()).removeprefix(f"{name}: ").replace("; nothing was sent", "")
    return Review(job, site, app, digest, _submitter(app, kit), cost, refusal, approval.read_approvals(local).get(digest, {}))


def _identity(config: JobConfig, site: SiteConfig, kit: Path, name: str) -> Identity | None:
    """Return the kit's identity for a job with secure aggregation, else None. Raises ConfigError if the kit is locked."""
    if config.secure_aggregation is None or kit_role(kit) is None:
        return None
    private_key_path(kit)
    server = str(read_settings(kit / "startup" / "fed_client.json")["servers"][0]["identity"])
    return read_identity(kit / "startup", name, server, site.secure_aggregation)


def _check_checkpoint(config: JobConfig, site: SiteConfig) -> None:
    """Raise ConfigError if the base model that the job names is not at this site, or is another one than the job names."""
    path, wanted = checkpoint_of(config.model, site), config.model.checkpoint_sha256
    if path is None:
        return
    found = checkpoint_hash(path) if path.exists() else "none: it is not there"
    if not path.exists() or (wanted and found != wanted):
        raise ConfigError(
            f"model.checkpoint: {path}: SHA-256 {found}, the job's model has {wanted or 'any'}; ask the researcher",
            Reason.CHECKPOINT,
        )


def _cost(guard: Guard, run: str, generated: bool) -> Cost:
    """Return what all rounds of a new run would spend at the site. `generated`: the job generates its data."""
    rows = guard.ledger.entries(guard.dataset)
    planned = [] if guard.test_only else guard.planned_rows(run)
    budgets = {}
    for unit, budget in guard.policy.budgets.items():
        spent, after = (epsilon_for(str(unit), of, budget.delta) for of in (rows, [*rows, *planned]))
        budgets[str(unit)] = {"spent": spent, "after": after, "budget": budget.epsilon, "delta": budget.delta}
    dataset = "" if generated and guard.policy.dataset is None else guard.dataset
    return Cost(dataset, generated, guard.num_samples, guard.shown_samples, guard.plan if planned else None, budgets)


def _submitter(app: Path, kit: Path) -> str:
    """Return the person who submitted a job that a server has sent; "" for any other folder.

    FLARE writes a received job into the kit. The meta.json of a folder elsewhere is its author's, who may write any name.
    """
    if not app.resolve().is_relative_to(kit.resolve()):
        return ""
    with suppress(OSError, ValueError, AttributeError):
        meta = read_json(app.resolve().parent / "meta.json")
        if name := meta.get(JobMetaKey.SUBMITTER_NAME):
            return f"{name} ({meta.get(JobMetaKey.SUBMITTER_ROLE)} of {meta.get(JobMetaKey.SUBMITTER_ORG)}), as the server says"
    return ""


def _privacy_text(job: Job, cost: Cost | None) -> str:
    config = job.config
    if config.privacy is None:
        return "none: the job asks for no noise"
    plan = make_plan(config, job.strategy, names=job.initial) if cost is None else cost.plan
    if plan is None:
        return f"{config.privacy.unit} level; " + ("its cost depends on your data" if cost is None else "nothing is spent here")
    spent = f"spends at most epsilon {plan.epsilon():.3g} at delta {plan.config.delta:g} for each {plan.config.unit}"
    return f"{spent} ({plan.config.adjacency}, trust {plan.config.trust})"


def _budget_texts(site: SiteConfig, cost: Cost | None) -> Iterator[str]:
    if not site.privacy.budgets:
        yield "none in site.yaml" + (": jobs may spend any epsilon" if site.privacy.trust is None else "")
    elif cost is None:
        yield "not read, see below"
    for unit, one in cost.budgets.items() if cost else ():
        spent, after, whole = one["spent"], one["after"], one["budget"]
        left = f"{max(whole - after, 0):.3g} left" if after <= whole * (1 + 1e-6) else "over the budget"
        then = "with this job it has no bound" if after == float("inf") else f"{after:.3g} with this job, {left}"
        of = (cost and cost.dataset) or "the generated data"
        yield f"each {unit} of {of}: epsilon {spent:.3g} of {whole:g} spent (delta {one['delta']:g}); {then}"


def _sent_lines(job: Job, site: SiteConfig, cost: Cost | None) -> Iterator[str]:
    """Yield what a site sends: tensors, counts, its own model, scores."""
    config = job.config
    if site.test_only:
        yield "no update: site.yaml says test_only"
    elif config.trains:
        private = config.privacy
        noise = "without noise" if private is None else f"clipped to {private.clip:g}, with noise"
        if private is not None and private.trust == "central":
            noise = f"clipped to {private.clip:g}; the server adds the noise"
        masked = "; masked, so that the server learns sums only" if config.secure_aggregation is not None else ""
        numbers, tensors = Counter[int](), set[str]()
        for round, phase in job.strategy.traits.phase_schedule():
            if round < config.training.rounds:
                names = job.strategy.names(job.initial, Role.SHARED, round, phase)
                numbers[round] += sum(job.initial[name].numel() for name in names)
                tensors |= {*names}
        most = max(numbers.values(), default=0)
        yield f"each round: up to {most:,} trained numbers in {len(tensors)} tensors, {noise}{masked}"
    if config.statistics:
        least = max(config.statistics.minimum, site.statistics_minimum)
        yield f"once: counts of your data, none of fewer than {least} patients"
    if config.cross_site and config.cross_site.personalized and site.share_personalized:
        yield "this site's own model, to be scored at the other sites (share_personalized)"
    scores = "scores of the models" if shares_scores(config, site) else "no scores"
    counted = cost is None or cost.shown_samples == cost.samples
    yield f"{scores}; {'the' if counted else 'no'} number of samples; versions of packages; if it fails, one word"
