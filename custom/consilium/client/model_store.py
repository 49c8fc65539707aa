"""Stored models: a site's best one during a run, its folder for each model at the end, and the server's folder."""

from collections.abc import Mapping
from dataclasses import replace
from math import fsum
from pathlib import Path

from consilium.adapters import adapter_state
from consilium.adapters.names import is_local_adapter
from consilium.client.context import ClientContext
from consilium.config.job import JobConfig, load_run_job
from consilium.core.errors import Reason, RefusedError
from consilium.core.messages import MetricKey, Payload, SiteInfo, Stage, Tensors
from consilium.core.storage import checkpoint_hash
from consilium.federation.job_consistency import name_base_changes
from consilium.federation.model_card import BEST, Card, scores_of
from consilium.federation.saved_model import (
    ADAPTERS,
    SavedModel,
    convert_changes_to_parameters,
    keeps_local,
    leading_score_name,
    read_adapter_folder,
    read_best,
    save_if_best,
    write_adapter_folder,
)
from consilium.privacy.plan import Plan, not_private_sentence
from consilium.report.run_files import RunLog
from consilium.report.tables import only_true
from consilium.strategies.strategy import Interpolation, Strategy, scaling_multiplier
from consilium.training.interpolation import fixed_weight

UNCOVERED = (
    "The privacy claim is of what leaves the site. This folder holds tensors of the site's own, which no noise covers: "
    "hand it to nobody outside."
)


class ModelStore:
    """Stores the models of one client in its folder."""

    def __init__(self, context: ClientContext) -> None:
        self.context = context

    def build_global(self, values: Tensors, payload: Payload) -> SavedModel:
        """Return the model of the values with the scaling and round of `payload`."""
        return SavedModel(values, payload.round, scaling_multiplier(self.context.strategy, payload))

    def build_personalized(self, values: Tensors, payload: Payload, closing: bool) -> SavedModel:
        """Return the personalized model after a round's training or, if `closing`, after the training at the end of the run."""
        found = replace(self.build_global(values, payload), rounds=payload.round + (not closing))
        if (blend := interpolation_of(self.context.strategy, closing)) is not None:
            found = replace(found, share=fixed_weight(blend), similar=blend.examples)
        return found

    def save_if_best(self, run: str, stage: Stage, kept: SavedModel, metrics: Mapping[str, float]) -> None:
        """Store a model if its validation score is the best of its stage so far."""
        config = self.context.config
        reported = [key.metric for name in metrics if (key := MetricKey.parse(name)) and key.stage is stage]
        metric = leading_score_name(config, reported)
        save_if_best(
            self._best_path(run, stage), kept, config, metric, metrics.get(str(MetricKey("validation", stage, metric)))
        )

    def write_models(self, run: str, models: Mapping[Stage, SavedModel], metrics: Mapping[str, float]) -> None:
        """Write a folder for every model, and one for the best model of each stage."""
        shares_scores = self.context.shares_scores
        for stage, kept in models.items():
            split, found = scores_of(self.context.config, metrics, stage) if shares_scores else ("", {})
            self._write_folder(stage, kept, split=split, scores=found)
            if best := read_best(self._best_path(run, stage)):
                self._write_folder(f"{stage}{BEST}", best[0], best=best[1] if shares_scores else None)

    def _write_folder(self, name: str, kept: SavedModel, **more: object) -> None:
        context, config, plan = self.context, self.context.config, self.context.plan
        blocks = context.load_values(kept.values)
        others = convert_changes_to_parameters(context.model, kept.values)
        if not kept.share:
            others = {name: tensor for name, tensor in others.items() if not is_local_adapter(name)}
        card = Card.of(
            config, name, kept.rounds, self.base_sha256(), site=context.name,
            training=context.task.num_samples if config.privacy is None else None,
            privacy=plan.claim() if plan else "", notes=tuple(self._notes(name, blocks)), **more,
        )  # fmt: skip
        write_adapter_folder(context.folder / ADAPTERS / name, kept, others, config, card, plan)

    def _notes(self, name: str, blocks: set[str]) -> list[str]:
        """Return notes for the card of the model `name`. `blocks`: the base's blocks that the model skips."""
        context = self.context
        private, local = context.config.privacy, keeps_local(context.strategy, adapter_state.tensors(context.model))
        own = name.startswith(Stage.PERSONALIZED) or local
        chosen = len(context.strategy.final_candidates(Payload(0, 0, adapter_state.values(context.model)))) > 1
        listed = ", ".join(f"`{block}`" for block in sorted(blocks))
        notes = {
            UNCOVERED: private is not None and ((private.unit == "site" and own) or chosen),
            f"It runs without the base's blocks {listed}, which other programs do not know.": blocks,
        }
        return only_true(notes)

    def _best_path(self, run: str, stage: Stage) -> Path:
        return self.context.folder / run / f"best-{stage}.safetensors"

    def base_sha256(self) -> str:
        """Return the SHA-256 of the base's checkpoint, "" if the weights come with the package."""
        return checkpoint_hash(self.context.checkpoint) if self.context.checkpoint else ""

    def scored_run(self, run: str) -> str:
        """Return the site's name of the run whose models are scored: a former run in a cross-site job, otherwise `run`."""
        own, _, _ = run.partition(".")
        found = [f"{own}.{former.digest[:16]}" for former in possible_scored_jobs(self.context.config)]
        return next((one for one in found if (self.context.folder / one).is_dir()), run)

    def personalized_model(self) -> Payload:
        """Return this site's personalized model of the run that a cross-site job scores, for its guard.

        Raises RefusedError if the site has none, or one of another job.
        """
        context, folder = self.context, self.context.folder / ADAPTERS / Stage.PERSONALIZED
        if not folder.is_dir():
            raise RefusedError(f"{context.name}: {folder}: there is no personalized model of the run", Reason.MODEL)
        kept, _ = read_adapter_folder(folder)
        digest = load_run_job(folder, frozenset(context.config.packages)).digest
        if digest not in {one.digest for one in possible_scored_jobs(context.config)}:
            raise RefusedError(f"{context.name}: {folder}: is of another job than the run that is scored", Reason.MODEL)
        return Payload(-1, -1, kept.values, {"scaling": kept.scaling, "share": kept.share})


def possible_scored_jobs(config: JobConfig) -> list[JobConfig]:
    """Return the two possible jobs of the run that a cross-site job scores: with the run's name as `experiment`, or without."""
    names = (config.cross_site.run, None) if config.cross_site else ()
    return [config.model_copy(update={"cross_site": None, "experiment": name}) for name in names]


def interpolation_of(strategy: Strategy, closing: bool) -> Interpolation | None:
    """Return the strategy's interpolation of global and local adapter.

    Return None during the rounds if the local adapter trains only after the last round. `closing`: the rounds have ended.
    """
    return strategy.traits.interpolation if closing or not strategy.traits.fits_after_last_round else None


def write_shared_model(
    folder: Path,
    config: JobConfig,
    kept: SavedModel,
    sites: Mapping[str, SiteInfo],
    log: RunLog,
    base_sha256: str | None,
    plan: Plan | None,
) -> None:
    """Write the server's adapter, which all sites share, into a run's `folder`. The scores in its card are means over sites.

    `sites`: the sites that are registered at the end of the run. `log`: its record.
    """
    # the number of samples is not known of a site that has left
    known = config.privacy is None and log.trained <= sites.keys()
    told = sum(sites[name].num_samples for name in log.trained) if known else None
    trained = {site: one for site, one in log.results.items() if site not in sites or sites[site].num_samples}
    found = [scores_of(config, metrics, Stage.GLOBAL) for metrics in (trained or log.results).values()]
    values: dict[str, list[float]] = {}
    for _, scores in found:
        for name, (value, _, _) in scores.items():
            values.setdefault(name, []).append(value)
    split = next((split for split, scores in found if scores), "")
    means = {name: (fsum(each) / len(each), min(each), max(each)) for name, each in values.items()}
    claim = "" if plan is None else plan.claim()
    if plan is None and config.privacy is not None:  # with DP-SGD at each site, only the sites know their epsilon
        void = f"{not_private_sentence(log.seeded)} " if log.seeded else ""
        claim = f"{void}{config.privacy.unit} level; each site's own model card has its epsilon"
    card = Card.of(
        config, Stage.GLOBAL, kept.rounds, base_sha256 or "", sites=len(log.trained), training=told, split=split, scores=means,
        interval="lowest and highest site; the value is their mean", privacy=claim,
    )  # fmt: skip
    write_adapter_folder(folder / ADAPTERS / Stage.GLOBAL, kept, name_base_changes(kept.values), config, card, plan)
