"""What a site keeps of its models: while a run goes on the best by validation, at its end a folder for each."""

from collections.abc import Collection, Mapping
from math import fsum
from pathlib import Path

from consilium.adapters import layers
from consilium.adapters.names import is_local
from consilium.client.trainer import LocalTraining
from consilium.config.job import JobConfig
from consilium.core.messages import MetricKey, Payload, SiteInfo, Stage, Tensors
from consilium.federation.model_card import BEST, Card, Score, scores_of
from consilium.federation.saved_model import (
    ADAPTERS,
    SavedModel,
    keeps_local,
    leading,
    load_values,
    note_best,
    read_best,
    with_parameters,
    write_kept,
)
from consilium.federation.trainable_checks import as_changes
from consilium.privacy.plan import Plan, not_private
from consilium.report.run_record import Results

UNCOVERED = (
    "The privacy claim is of what leaves the site. This folder holds tensors of the site's own, which no noise covers: "
    "hand it to nobody outside."
)


class Keeping(LocalTraining):
    """The part of a site that keeps models; see Site. `shares_scores`: whether a model card may have the site's scores."""

    folder: Path
    shares_scores: bool = True

    def load(self, values: Tensors) -> set[str]:
        """Put `values` into the model; return the blocks that it runs without, those whose tensors are not among them."""
        return load_values(self.model, self.strategy, values, self.name)

    def received(self, values: Tensors, payload: Payload) -> SavedModel:
        """Return the global model as it was received."""
        return SavedModel(values, payload.round, self.strategy.scaling(payload))

    def own_model(self, values: Tensors, payload: Payload, closing: bool) -> SavedModel:
        """Return the personalized model after a round's training, or after that at the end of the run."""
        blend, scaling = self.strategy.blend(closing), self.strategy.scaling(payload)
        rounds = payload.round + (not closing)
        return SavedModel(values, rounds, scaling, blend.most, blend.examples) if blend else SavedModel(values, rounds, scaling)

    def note_best(self, run: str, stage: Stage, kept: SavedModel, metrics: Mapping[str, float]) -> None:
        """Keep a model if its score on validation data is the best of its stage so far."""
        told = [key.metric for name in metrics if (key := MetricKey.parse(name)) and key.stage is stage]
        metric = leading(self.config, told)
        score = metrics.get(str(MetricKey("validation", stage, metric)))
        note_best(self._best(run, stage), kept, self.config, metric, score)

    def keep(self, run: str, models: Mapping[Stage, SavedModel], metrics: Mapping[str, float], base_sha256: str) -> None:
        """Write the folder of every model, and of the best of each stage."""
        for stage, kept in models.items():
            split, scores = scores_of(self.config, metrics, stage) if self.shares_scores else ("", {})
            self._write(stage, kept, base_sha256, split=split, scores=scores)
            if best := read_best(self._best(run, stage)):
                self._write(f"{stage}{BEST}", best[0], base_sha256, best=best[1] if self.shares_scores else None)

    def _write(self, name: str, kept: SavedModel, base_sha256: str, **more: object) -> None:
        blocks = self.load(kept.values)
        others = with_parameters(self.model, kept.values)
        if not kept.share:
            others = {name: tensor for name, tensor in others.items() if not is_local(name)}
        told = self.task.num_samples if self.config.privacy is None else None
        card = Card.of(
            self.config, name, kept.rounds, base_sha256, site=self.name, training=told,
            privacy=self.plan.claim() if self.plan else "", notes=tuple(self._notes(name, blocks)), **more,
        )  # fmt: skip
        write_kept(self.folder / ADAPTERS / name, kept, others, self.config, card, self.plan)

    def _notes(self, name: str, blocks: set[str]) -> list[str]:
        """Return what else a user of the model `name` must know, which runs without these blocks."""
        private, local = self.config.privacy, keeps_local(self.strategy, layers.tensors(self.model))
        own = name.startswith(Stage.PERSONALIZED) or local
        found = [UNCOVERED] if private is not None and ((private.unit == "site" and own) or self._chose()) else []
        if blocks:
            listed = ", ".join(f"`{block}`" for block in sorted(blocks))
            found.append(f"It runs without the base's blocks {listed}, which other programs do not know.")
        return found

    def _chose(self) -> bool:
        """Tell whether validation data chose what the model is."""
        return len(self.strategy.choices(Payload(0, 0, layers.values(self.model)))) > 1

    def _best(self, run: str, stage: Stage) -> Path:
        return self.folder / run / f"best-{stage}.safetensors"


def keep_shared(
    folder: Path,
    config: JobConfig,
    kept: SavedModel,
    sites: Mapping[str, SiteInfo],
    results: Results,
    base_sha256: str | None,
    plan: Plan | None,
    seeded: Collection[str],
) -> None:
    """Write the adapter that all sites share, as the server has it, into a run's `folder`; its scores are means over sites.

    `seeded`: the sites whose noise came from a seed.
    """
    told = sum(site.num_samples for site in sites.values()) if config.privacy is None else None
    trained = {site: one for site, one in results.items() if site not in sites or sites[site].num_samples}
    split, scores = _over_sites(config, trained or results)
    card = Card.of(
        config, Stage.GLOBAL, kept.rounds, base_sha256 or "", sites=len(sites), training=told, split=split, scores=scores,
        interval="lowest and highest site; the value is their mean", privacy=_claim(config, plan, seeded),
    )  # fmt: skip
    write_kept(folder / ADAPTERS / Stage.GLOBAL, kept, as_changes(kept.values), config, card, plan)


def _over_sites(config: JobConfig, results: Results) -> tuple[str, dict[str, Score]]:
    found = [scores_of(config, metrics, Stage.GLOBAL) for metrics in results.values()]
    by_name: dict[str, list[float]] = {}
    for _, scores in found:
        for name, (value, _, _) in scores.items():
            by_name.setdefault(name, []).append(value)
    split = next((split for split, scores in found if scores), "")
    return split, {name: (fsum(values) / len(values), min(values), max(values)) for name, values in by_name.items()}


def _claim(config: JobConfig, plan: Plan | None, seeded: Collection[str]) -> str:
    """Return the privacy of the shared adapter. Only sites know the epsilon of their own record-level plans."""
    if plan is not None:
        return plan.claim()
    if config.privacy is None:
        return ""
    void = f"{not_private(seeded)} " if seeded else ""
    return f"{void}{config.privacy.unit} level; each site's own model card has its epsilon"
