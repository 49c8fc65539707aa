"""The coordinator of one run at the server: registers sites, samples them, accepts results, ends rounds, writes checkpoints."""

import math
import random
import secrets
import threading
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from consilium.client.model_store import write_shared_model
from consilium.config.site import SiteConfig
from consilium.core.errors import ConsiliumError, Reason, RefusedError, raise_first
from consilium.core.messages import HELD_OUT, Hello, Observer, Payload, SiteInfo, Tensors, is_hash_or_empty
from consilium.core.sanitize import count_with_noun, shown
from consilium.core.seeding import seed_for
from consilium.core.storage import lock_folder, read_json, sweep, write_json
from consilium.federation.diagnostics import deviation
from consilium.federation.job_assembly import Job
from consilium.federation.saved_model import SavedModel, keeps_local
from consilium.privacy.guard.release import geometries, noised_sum, server_sees_only_sums, upload_shapes
from consilium.privacy.mechanism import Geometry, privatized_coordinates, restore_update, to_real_numbers
from consilium.privacy.plan import Plan, make_plan, not_private_sentence
from consilium.privacy.randomness import Randomness
from consilium.report.run_files import RunLog
from consilium.report.tracking import Tracker
from consilium.server import run_start
from consilium.server.aggregation import aggregate_for, aggregate_results, mean_penalty_losses
from consilium.server.checks import check_evaluation, check_hello, check_update, refusals_text, remedy_text
from consilium.server.early_stopping import early_end, no_score_warning, updated_validations
from consilium.server.run_start import Saved, server_start
from consilium.server.statistics_round import StatisticsRound
from consilium.strategies.strategy import RoundResults, SiteResult, scaling_multiplier

# ledger seals ----------------------------------------------------------------------------------------------------------
# The last seal of each site's privacy ledger that the server has received, over all runs.
#
# A site cannot detect that its ledger and records were restored together from an older state. So the server sends the seal with
# its next hello, and the site looks for it in its ledger (ledger.py).

FILE = "seals.json"
"""The file with the last seal of each site, {site: seal}, in the server kit's folder for consilium."""


class Seals:
    """The seals in one file, for any number of processes. Without a `path`, as in a simulation, no seals are stored.

    If the file cannot be read or written, sites lose this check, but jobs continue.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path

    def note(self, site: str, seal: str) -> None:
        """Store the seal that a site has just sent. "", the seal of an empty ledger, is not stored."""
        if self._path and seal and self.last_seal(site) != seal:
            with suppress(OSError), lock_folder(self._path.parent):
                write_json(self._path, self._read() | {site: seal})

    def last_seal(self, site: str) -> str:
        """Return the last seal of a site; "" if none is known."""
        return self._read().get(site, "")

    def _read(self) -> dict[str, str]:
        try:
            found = read_json(self._path) if self._path else {}
        except (OSError, ValueError, RecursionError):
            return {}
        return {name: seal for name, seal in found.items() if is_hash_or_empty(seal)} if isinstance(found, dict) else {}


# coordinator -----------------------------------------------------------------------------------------------------------


class Coordinator:
    """Coordinates one run. Both engines (in-process and FLARE) call the same methods in the same order.

    The order is welcome* -> (start -> accept* -> conclude) until done -> start_final_evaluation -> accept_final* -> finish.
    welcome and accept may be called from several threads. `own`: the server's settings: the base's checkpoint, for strategies
    that start from its weights, and the place of run tracking; `seals`: the last seals of sites' ledgers, over all runs.
    """

    def __init__(
        self,
        job: Job,
        folder: Path,
        observer: Observer,
        resume: bool = False,
        own: SiteConfig = SiteConfig(),  # noqa: B008
        seals: Seals = Seals(),  # noqa: B008
    ) -> None:
        self.job, self.folder, self.observer, self.seals = job, folder, observer, seals
        wanted = partial(Tracker, own.tracking.mlflow, folder, job.config, observer) if own.tracking else None
        self.log = RunLog(folder, job.config, resume, wanted)
        sweep(folder)
        self.sites: dict[str, SiteInfo] = {}
        """The registered sites. A change of its keys makes a new dict, so that other threads may iterate over the old one."""
        self.asked: dict[str, SiteInfo] = {}
        self.sent: dict[str, Payload] = {}
        self._results: dict[str, SiteResult] = {}
        self.accepted, self._trained, self.reasons = set[str](), list[dict[str, float]](), dict[str, str]()
        self.declined: dict[str, str] = {}
        """By site, why it may not join or did not join."""
        self._lock = threading.Lock()
        self.survey = StatisticsRound(job.config, folder, observer)
        self.aggregate = aggregate_for(job)
        self.plan = make_plan(job.config, job.strategy, names=job.initial)
        if resume:
            saved = run_start.load_for_resume(folder, job)
        else:
            start = server_start(job, own)
            if start.adapter:
                self.log.record("start", round=0, phase=0, adapter_sha256=start.adapter)
            saved = Saved(secrets.token_hex(6), start.checkpoint, job.strategy.initialize(start.tensors))
        self.run, self.checkpoint, self.state, self.validations = saved
        if resume:
            for changed in self.log.record_resume(self.state):
                observer(
                    {
                        "event": "warning",
                        "text": f"resumed with another version: {changed}; the run's numbers are of both, see versions.json",
                    }
                )
            # a site whose former noise came from a seed may be away from now on
            self.plan = self.plan and self.plan.with_seeded_noise(self.log.seeded)
        else:
            self.log.record_run_start(job.strategy, job.initial)
            self._write_checkpoint()  # so that a run interrupted in round 0 resumes with its name, and no site pays twice

    @property
    def is_done(self) -> bool:
        """True after the last round, after early stopping, and for a job without rounds."""
        config, over = self.job.config, self.state.round >= self.job.config.training.rounds
        return not config.trains or over or early_end(config, self.state, self.validations) is not None

    @property
    def quorum(self) -> int:
        """The number of results that a round needs. A centralized reference run has one pooled site, so it needs 1."""
        return 1 if self.job.strategy.traits.pools_data else self.job.config.federation.min_sites

    @property
    def has_quorum(self) -> bool:
        """True if this phase has enough accepted results."""
        return len(self.accepted) >= self.quorum

    @property
    def trainers(self) -> dict[str, SiteInfo]:
        """The sites that train and count for the quorum: all except those that only test."""
        return {name: site for name, site in self.sites.items() if site.num_samples}

    def welcome(self, hello: Hello) -> None:
        """Register a site. Raises RefusedError, with a text for the site's log, if the site cannot take part."""
        check_hello(hello, self.job.config.packages)
        named = self.job.config.model.checkpoint_sha256
        with self._lock:
            if (wanted := named or self.checkpoint) is not None and hello.checkpoint != wanted:
                others = "the sites admitted before, or the adapter it starts from, have"
                whose = "model.checkpoint_sha256 is" if named else others
                raise RefusedError(
                    f"{hello.name}: its base checkpoint has sha256 {hello.checkpoint or '(none)'}, {whose} "
                    f"{wanted or '(none)'}; give every site the same file, and name its sha256 in model.checkpoint_sha256 of "
                    "the job"
                )
            self.checkpoint = hello.checkpoint
            carries = hello.capacity if self.job.config.adapter_kind.unequal_ranks else {}
            self.sites = self.sites | {hello.name: SiteInfo(hello.name, hello.num_samples, hello.joined, carries)}
            if hello.seeded:
                self.plan = self.plan and self.plan.with_seeded_noise([hello.name])
        if hello.seeded:
            self.observer({"event": "warning", "text": not_private_sentence([hello.name])})
        self.log.record_join(self.state.round, hello.name, hello.ledger, not hello.num_samples, hello.seeded)
        self.seals.note(hello.name, hello.ledger)
        self.observer({"event": "site", "site": hello.name, "num_samples": hello.num_samples})

    def add_absent_sites(self, names: Collection[str]) -> None:
        """Add sites that are not there, but whose masked updates of the next phase are stored."""
        with self._lock:
            self.sites = self.sites | {name: SiteInfo(name, 1, joined=True) for name in names}

    def forget_sites(self, names: Collection[str]) -> None:
        """Remove sites, which may register again. Their results of the current phase still count."""
        with self._lock:
            self.sites = {name: site for name, site in self.sites.items() if name not in names}

    def start(self, names: Collection[str] | None = None) -> dict[str, Payload]:
        """Begin a phase, with those of the sites `names` that are registered if given; return the payload of each site.

        Raises ConsiliumError if there are fewer sites than the quorum.
        """
        with self._lock:
            if len(self.trainers) < self.quorum:
                here = len(self.trainers)
                have = f"{count_with_noun(here, 'site')} {'is' if here == 1 else 'are'} here"
                have += f", federation.min_sites is {self.quorum}"
                out = {name: reason for name, reason in self.declined.items() if name not in self.sites}
                step = "mend that, then submit the job again" if out else "wait for more sites or lower it"
                raise ConsiliumError(f"round {self.state.round + 1}: {refusals_text(out, 'refused')}{have}; {step}")
            if names is None:  # the sample follows from seed, round and the registered sites, and not from the phase
                config, every = self.job.config, sorted(self.trainers)
                count = config.federation.count_to_train(len(every))
                names = sorted(random.Random(seed_for(config.training.seed, "sample", self.state.round)).sample(every, count))
            self.asked = {name: self.sites[name] for name in names if name in self.sites}
            self.accepted, self._results, self._trained, self.reasons = set(), {}, [], {}
            self.aggregate.reset(len(self.asked))
        if (self.state.round, self.state.phase) == (0, 0):
            # Report, before any training, the strategy's warnings, the privacy claim, and the effect of its noise.
            for warning in (*self.job.warnings, *self.job.strategy.traits.warnings):
                self.observer({"event": "warning", "text": warning})
            if self.plan is not None:
                sent = self.job.strategy.payload(self.state, SiteInfo("", 1, joined=True))  # all sites get the same
                shapes = upload_shapes(self.job.strategy, sent)
                warnings = self.plan.warnings(sum(map(math.prod, shapes.values())), len(self.asked))
                self.observer({"event": "privacy", "claim": self.plan.claim(), "warnings": warnings})
        place = {
            "round": self.state.round,
            "phase": self.state.phase,
            "phases": self.job.strategy.traits.phases_of(self.state.round),
        }
        self.observer({"event": "round", **place, "sites": sorted(self.asked)})
        self.log.record("started", round=self.state.round, phase=self.state.phase, sites=sorted(self.asked))
        self.sent = {name: self.job.strategy.payload(self.state, site) for name, site in self.asked.items()}
        for name, payload in self.sent.items():
            self.log.note_sent_bytes(name, payload)
        return dict(self.sent)

    def evaluation_payloads(self) -> dict[str, Payload]:
        """Return, by site, the payloads for sites that evaluate but do not train in this round (`fraction_evaluate`)."""
        if self.state.phase:
            return {}
        others = {name: site for name, site in self.trainers.items() if name not in self.asked}
        generator = random.Random(seed_for(self.job.config.training.seed, "held-out", self.state.round))
        drawn = sorted(generator.sample(sorted(others), self.job.config.federation.count_to_evaluate(len(others))))
        return {name: replace(self.job.strategy.final(self.state, others[name]), phase=HELD_OUT) for name in drawn}

    def accept_held_out(self, name: str, result: Payload) -> str | None:
        """Store the metrics of a site that does not train in this round. Return None, or why they were refused."""
        try:
            check_evaluation(self.job, result, self.state.round, HELD_OUT)
        except RefusedError as refusal:
            return self.refuse(name, str(refusal))
        self.log.record("held_out", site=name, round=result.round, metrics=result.metrics)
        self.observer({"event": "held_out", "site": name, "round": result.round, "metrics": result.metrics})
        return None

    def accept(self, name: str, result: Payload) -> str | None:
        """Add one site's result to the round. Return None, or why it was refused. A refusal never stops the round."""
        with self._lock:
            try:
                sent = self.payload_answered(name, result)
                weight = self.job.config.weight(self.asked[name].num_samples)
                plan, summed = self._central_plan, result
                if plan is not None and not server_sees_only_sums(self.job.config):
                    # Sites clip but send float32. So their whitened coordinates are clipped once more, in integers on the grid.
                    maps = self._whitening_maps(result.tensors)
                    coordinates, _ = privatized_coordinates(result.tensors, maps, plan.config.clip, 0, each=plan.by_tensor)
                    summed = replace(result, tensors=coordinates)
                self.aggregate.add(self.asked[name], summed, weight, sent)
            except ConsiliumError as refusal:
                return self.refuse(name, str(refusal))
            if self.job.config.diagnostics.deviation:
                self._results[name] = SiteResult(result, weight, sent, self.asked[name])
            self.accepted.add(name)
            self._trained.append(result.metrics)
            if name in self.sites:  # otherwise it has left, and must register again
                self.sites[name] = replace(self.sites[name], joined=True)
        self.log.record_result(name, result, weight)
        self.seals.note(name, result.ledger)
        self.observer({"event": "accepted", "site": name, "round": result.round, "metrics": result.metrics})
        return None

    def refuse(self, name: str, reason: str, joining: bool = False, site_reason: Reason | None = None) -> str:
        """Record why a site has no usable answer or may not join (`joining`). Return the reason, cut to 1,000 characters.

        `site_reason`: the Reason, if the text comes from the site itself.
        """
        reason = shown(reason, 1000)
        told = self.declined if joining else self.reasons
        told[name] = site_reason.text if site_reason else reason  # a site's text may name data, so others see its Reason only
        refusal = {"site": name, "round": self.state.round, "reason": reason, "joining": joining}
        self.observer({"event": "refused", **refusal})
        self.log.record("refused", **refusal)
        self.survey.decline(name, told[name])
        return reason

    def payload_answered(self, name: str, result: Payload) -> Payload:
        """Return the payload that was sent to the site in this phase. Raises RefusedError unless the result answers it."""
        problems = {
            f"{name} was not asked in this phase, or has answered already": name not in self.asked or name in self.accepted,
            f"stale: answers round {shown(result.round, 20)} phase {shown(result.phase, 20)}, the federation is at round "
            f"{self.state.round} phase {self.state.phase}": (
                (result.round, result.phase) != (self.state.round, self.state.phase)
            ),
        }
        raise_first(problems, RefusedError)
        sent = self.sent[name]
        check_update(self.job, self.plan, result, sent)
        return sent

    def conclude(self, seen: Mapping[str, float] | None = None) -> None:
        """End the phase: aggregate, write the checkpoint, and log the measurements `seen`.

        Raises ConsiliumError if there are fewer results than the quorum, or if they cannot be aggregated.
        """
        config = self.job.config
        with self._lock:
            if not self.has_quorum:
                few = f"{len(self.accepted)} of {len(self.asked)} results, federation.min_sites is {self.quorum}"
                step = remedy_text(self.reasons, self.asked, self.quorum)
                raise ConsiliumError(f"round {self.state.round + 1}: {refusals_text(self.reasons)}{few}; {step}")
            if plan := self._central_plan:  # noise of sigma S on the sum, then divided by the number of results
                noised = to_real_numbers(noised_sum(plan, self.aggregate.take_sums(), Randomness.of(None)))
                means = {name: tensor / len(self.accepted) for name, tensor in noised.items()}
                mean: RoundResults = restore_update(self._whitening_maps(noised), means)
            else:
                mean = self.aggregate.take()
            curves = self.job.strategy.diagnostics(self.state, mean) | mean_penalty_losses(self._trained)
            if config.diagnostics.deviation:
                curves |= deviation(self.job.strategy, self.state, self._results, config.adapter.product_scaling)
            ended, self.state = self.state, aggregate_results(self.job, self.state, mean)
            place = config, self.job.strategy, ended
            self.validations = updated_validations(*place, self.validations, self._trained)
            # With trust central nothing of `mean` is written before the checkpoint: a server that stopped between would draw
            # other noise when it resumes, and numbers of both sums together would reveal more than one release. In all other
            # runs the lines come first, because a resumed server writes them again.
            if plan:
                self._write_checkpoint()
            # the epsilon, after this phase, of a site that answered every phase
            before = sum(self.job.strategy.traits.phases_of(round) for round in range(ended.round))
            epsilon = None if self.plan is None else self.plan.epsilon(before + ended.phase + 1)
            self.log.record_phase_end(ended, sorted(self.accepted), epsilon, mean)
            self.log.record_diagnostics(ended, curves | dict(seen or {}))
            if warning := no_score_warning(*place, self.validations):
                self.observer({"event": "warning", "text": warning})
            self.log.record_figures(self.state, self.state.matrices if self.job.strategy.traits.site_matrices else {})
            if not plan:
                self._write_checkpoint()
            self.asked, self.sent, self._results = {}, {}, {}

    @property
    def _central_plan(self) -> Plan | None:
        """The plan if the server adds the noise (trust central), otherwise None."""
        return self.plan if self.plan and self.plan.config.trust == "central" else None

    def _whitening_maps(self, tensors: Tensors) -> dict[str, Geometry]:
        """Return the maps that whiten `tensors`, for those with a public tensor to measure them by; see release.geometries."""
        public = self.state.shared | self.state.initial
        return geometries(self.job.strategy, self.job.config, tensors, public, self.state.round, self.state.phase)

    def start_final_evaluation(self) -> dict[str, Payload]:
        """Record early stopping, if the run ended so, and return the payload of each site for the final evaluation."""
        if ended := early_end(self.job.config, self.state, self.validations):
            self.log.record_early_end(ended)
            self.observer({"event": "ended", **ended})
        return {name: self.job.strategy.final(self.state, site) for name, site in sorted(self.sites.items())}

    def accept_final(self, name: str, result: Payload) -> str | None:
        """Store a site's final metrics. Return None, or why they were refused."""
        try:
            check_evaluation(self.job, result, self.state.round, self.state.phase)
        except RefusedError as refusal:
            return self.refuse(name, str(refusal))
        self.log.record_final_scores(name, result)
        self.seals.note(name, result.ledger)
        self.observer({"event": "final", "site": name, "metrics": result.metrics})
        return None

    def finish(self) -> None:
        """Write the results of a finished run, and the adapter if the server has a complete one."""
        self.log.finish(self.plan)
        strategy = self.job.strategy
        if self.job.config.trains and strategy.traits.needs == "sums" and not keeps_local(strategy, self.job.initial):
            last = strategy.final(self.state, SiteInfo("", 1, joined=True))
            kept = SavedModel(self.state.initial | last.tensors, self.state.round, scaling_multiplier(strategy, last))
            write_shared_model(self.folder, self.job.config, kept, self.sites, self.log, self.checkpoint, self.plan)

    def close(self) -> None:
        """Close the run's files."""
        self.log.close()

    def _write_checkpoint(self) -> None:
        run_start.write_run_checkpoint(self.folder, self.job, Saved(self.run, self.checkpoint, self.state, self.validations))
