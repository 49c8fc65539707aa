"""The files that the server writes of a run: job.yaml, versions.json, metrics.jsonl, TensorBoard events, results.json.

The coordinator writes them through `RunLog`. They are in the run's folder.
"""

import fcntl
import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from filelock import Timeout

from consilium import __version__
from consilium.config.code_digest import strategy_code_digest
from consilium.config.job import JobConfig
from consilium.core.errors import ConfigError
from consilium.core.lazy import torch
from consilium.core.messages import BYTES_DOWN, BYTES_UP, NOT_PRIVATE, Payload, Tensors
from consilium.core.norms import norm
from consilium.core.registry import installed_version
from consilium.core.sanitize import shown
from consilium.core.storage import file_lock, make_private_folder, open_private, write_atomic
from consilium.privacy.plan import Plan
from consilium.report import figures
from consilium.report.results_table import plot_confusions
from consilium.report.run_record import PACKAGES, roles_of
from consilium.report.tracking import FOLDER, EventFile, Tracker
from consilium.report.untrusted_files import place_of, read_json, read_lines, without_replaced_events
from consilium.strategies.strategy import Role, RoundResults, ServerState, Strategy

LOCK, MOMENT = ".run.lock", 1.0
"""LOCK: the file that a run's process locks. MOMENT: seconds to wait for it, since `has_process` takes it for an instant."""
MEANS = "(mean of sites)"
"""TensorBoard's folder for means over sites. No site can have this name."""
VERSIONS, THEN = "versions.json", ", then "
"""The file of versions. If a run was resumed with another version of a package, both are there, with THEN between them."""


class RunLog:
    """Writes the server's record of one run: metrics.jsonl, an event per line, and the files made of it.

    `track`: if given, it is called and returns a tracker, which gets the same numbers for MLflow.
    Raises ConfigError if `folder` holds a run already and `resume` is false, or if another process writes to the run.
    """

    def __init__(
        self, folder: Path, config: JobConfig, resume: bool = False, track: Callable[[], Tracker] | None = None
    ) -> None:
        self.folder = make_private_folder(folder)
        path = folder / "metrics.jsonl"
        if path.exists() and not resume:
            raise ConfigError(f"{folder}: holds a run already; resume it, or give the new one another name")
        self._lock = file_lock(folder / LOCK, wait=False)
        try:
            self._lock.acquire(MOMENT)  # it ends with the process, also after a crash
        except Timeout:
            raise ConfigError(f"{folder}: the run is going on in another process; wait until it has ended") from None
        except OSError as error:
            raise ConfigError(f"{folder}: cannot be locked ({error.strerror}); give a folder on another file system") from None
        self._file = open_private(path, "a" if resume else "x")
        if resume and not path.read_text(encoding="utf-8").endswith("\n"):
            self._file.write("\n")  # the last line was cut off by a crash
        self._test_only: set[str] = set()
        self.seeded: set[str] = set()
        """Sites whose noise comes from a seed."""
        self.trained: set[str] = set()
        """Sites whose results are in the mean of any phase."""
        self._events: dict[str, EventFile] = {}
        self._down: dict[str, int] = {}
        self.results: dict[str, dict[str, float]] = {}
        """The closing metrics of each site that reported them."""
        self._figures: dict[str, dict[int, dict[str, Any]]] = {}
        """The events "figure", by title and round."""
        self._curves: dict[float, dict[str, float]] = {}
        """The diagnostics, by the number of rounds done. Of two phases, the first ends half a round."""
        self._phase: list[dict[str, float]] = []
        # central trust hides each site's update from the readers of these files, not from this server
        self._sizes = (config.privacy is None or config.privacy.trust != "central") and config.secure_aggregation is None
        self._rounds = config.training.rounds
        self._classes = list(getattr(config.task, "classes", ()))
        self._config = config
        self._tracker, self._finished = track() if track else None, False

    def record_resume(self, state: ServerState) -> list[str]:
        """Record the phase at which a run resumes. The events of this phase and of later ones are then written again.

        Return a line for each package whose version has changed, and for the strategy's code if it has changed.
        """
        for event in without_replaced_events(read_lines(self.folder / "metrics.jsonl")[0]):
            kind = event["event"]
            if kind == "joined":
                self._note_site_marks(event)
            elif kind not in ("figure", "diagnostics", "concluded") or place_of(event) >= (state.round, state.phase):
                continue
            elif kind == "concluded":
                self.trained.update(event["sites"])
            elif kind == "diagnostics" or Path(event["title"]).name == event["title"]:  # a figure's title names its file
                self._note_drawn(event)
        self.record("resumed", round=state.round, phase=state.phase)
        return self._write_job_and_versions()

    def record(self, event: str, **fields: Any) -> None:
        """Write one event with the current time. `LINES` in untrusted_files.py has the fields of those that are read again."""
        self._file.write(json.dumps({"time": time.time(), "event": event, **fields}) + "\n")
        self._file.flush()

    def _write_job_and_versions(self) -> list[str]:
        """Write job.yaml and versions.json. Return a line for each version that has changed since the run began.

        Called only when the run goes on, so that a refused job leaves the files of another run as they are. A former version
        stays in versions.json beside the new one, because both produced the run's numbers.
        """
        write_atomic(self.folder / "job.yaml", yaml.safe_dump(self._config.model_dump(), sort_keys=False).encode())
        found = versions() | self._config.packages | {"code": strategy_code_digest(self._config)}
        former = read_json(self.folder / VERSIONS)
        before = {name: told for name, told in former.items() if name in found and isinstance(told, str)}
        changed = {name: f"{told}{THEN}{found[name]}" for name, told in before.items() if told.split(THEN)[-1] != found[name]}
        write_atomic(self.folder / VERSIONS, json.dumps(found | before | changed, indent=1).encode())
        return [f"{name} {told}" for name, told in changed.items() if name != "platform"]

    def record_run_start(self, strategy: Strategy, initial: Tensors) -> None:
        """Record the start of a new run: how many parameters are shared, are local to a site, and are frozen."""
        self._write_job_and_versions()
        roles = roles_of(strategy, initial)
        counts = {role.value: sum(initial[name].numel() for name, one in roles.items() if one is role) for role in Role}
        self.record("parameters", round=0, phase=0, **counts)

    def record_join(self, round: int, site: str, ledger: str, test_only: bool = False, seeded: bool = False) -> None:
        """Record that a site takes part, and the last seal of its privacy ledger. Each later result brings a newer seal.

        `seeded`: the site's noise comes from a seed.
        """
        marks = {name: True for name, true in (("test_only", test_only), ("seeded", seeded)) if true}
        line: dict[str, Any] = {"event": "joined", "site": site, "round": round, "ledger": ledger} | marks
        self._note_site_marks(line)
        self.record(**line)

    def _note_site_marks(self, joined: dict[str, Any]) -> None:
        """Note whether a site only tests, and whether its noise comes from a seed."""
        for mark, sites in (("test_only", self._test_only), ("seeded", self.seeded)):
            if joined.get(mark) is True:
                sites.add(joined["site"])

    def _note_drawn(self, line: dict[str, Any]) -> None:
        """Note an event that `finish` draws. It replaces the same event from before the run was resumed."""
        round = line["round"]
        if line["event"] == "figure":
            self._figures.setdefault(line["title"], {})[round] = line
        else:
            self._curves[round + (line["phase"] + 1) / self._config.strategy.traits.phases_of(round)] = line["values"]

    def note_sent_bytes(self, site: str, payload: Payload) -> None:
        """Note the bytes of the payload that a site receives."""
        self._down[site] = payload_bytes(payload.tensors)

    def record_result(self, site: str, result: Payload, weight: int = 1) -> None:
        """Record one accepted result and its weight in the mean."""
        up, down = payload_bytes(result.tensors), self._down.get(site, 0)
        values = result.metrics | {BYTES_UP: float(up), BYTES_DOWN: float(down)}
        place = {"site": site, "round": result.round, "phase": result.phase}
        self.record("result", **place, weight=weight, metrics=values, ledger=result.ledger)
        self._write_scalars(site, values | ({"update/norm": norm(result.tensors)} if self._sizes else {}), result.round)
        self._phase.append(values)

    def record_phase_end(
        self, state: ServerState, sites: list[str], epsilon: float | None = None, mean: RoundResults | None = None
    ) -> None:
        """Record that a phase ended, and the plan's epsilon so far.

        `sites`: sites whose results are in the phase's `mean`. The norm of `mean` goes to TensorBoard if it is tensors by name.
        """
        told = {} if epsilon is None else {"privacy/epsilon": epsilon}
        self.record("concluded", round=state.round, phase=state.phase, sites=sites, **told)
        self.trained.update(sites)
        if isinstance(mean, dict) and all(isinstance(tensor, torch.Tensor) for tensor in mean.values()):
            told["update/norm"] = norm(mean)
        self._write_scalars("server", told, state.round)
        self._write_scalars(MEANS, mean_metrics(self._phase), state.round)
        self._phase = []

    def record_diagnostics(self, state: ServerState, values: dict[str, float]) -> None:
        """Record the numbers that a strategy measured in a phase. `finish` draws them as curves."""
        if values:
            line: dict[str, Any] = {"event": "diagnostics", "round": state.round, "phase": state.phase, "values": values}
            self.record(**line)
            self._write_scalars("server", values, state.round)
            self._note_drawn(line)

    def record_figures(self, state: ServerState, matrices: Tensors) -> None:
        """Record matrices whose rows and columns are sites. `finish` draws the matrices of all rounds."""
        for title, matrix in matrices.items():
            stale = {name: state.round - 1 - last for name, last in state.reported.items()}
            line: dict[str, Any] = {
                "event": "figure",
                "round": state.round - 1,
                "title": title,
                "sites": sorted(state.sites),
                "staleness": stale,
                "values": matrix.tolist(),
            }
            self.record(**line)
            self._note_drawn(line)

    def record_final_scores(self, site: str, result: Payload) -> None:
        """Record a site's final evaluation."""
        self.results[site] = result.metrics
        self.record("final", site=site, round=result.round, metrics=result.metrics, ledger=result.ledger)
        self._write_scalars(site, result.metrics, result.round)

    def record_early_end(self, ending: Mapping[str, Any]) -> None:
        """Record that the rounds ended early, see server/coordinator.py."""
        self._rounds = ending["round"]
        self.record("ended", phase=0, **ending)

    def finish(self, plan: Plan | None = None) -> None:
        """Write results.json, the pictures and, for a private run, privacy.json. Called only at the end of a finished run."""
        for site in self.seeded & self.results.keys():
            self.results[site] = self.results[site] | {NOT_PRIVATE: 1.0}
        if plan is not None:
            write_atomic(
                self.folder / "privacy.json", json.dumps(plan.with_seeded_noise(self.seeded).summary(), indent=1).encode()
            )
        for title, rounds in self._figures.items():
            of_rounds = [
                figures.Matrix(f"round {one['round'] + 1}", np.asarray(one["values"]), one["sites"], one["sites"])
                for one in figures.pick_evenly(list(rounds.values()))
            ]
            figures.plot_matrices(self.folder / f"{title}.png", of_rounds, "gives", "receives", vmin=0, vmax=1)
        if self._curves:
            figures.plot_curves(self.folder / "diagnostics.png", self._curves)
        plot_confusions(self.folder / "confusion.png", self.results, self._classes)
        trained = [one for site, one in self.results.items() if site not in self._test_only]
        self._write_scalars(MEANS, mean_metrics(trained), self._rounds)
        write_atomic(self.folder / "results.json", json.dumps(self.results, indent=1, sort_keys=True).encode())
        self._finished = True

    def close(self) -> None:
        """Close all files."""
        self._file.close()
        self._lock.release()
        if self._tracker:
            self._tracker.close(self._finished)

    def _write_scalars(self, site: str, values: dict[str, float], step: int) -> None:
        self._events.setdefault(site, EventFile(self.folder / FOLDER / site)).add_scalars(values, step)
        if self._tracker:
            self._tracker.send_metrics(site, values, step)


def has_process(folder: Path) -> bool:
    """Return whether a process writes to the run in a folder, on any machine that shares the folder's file system.

    True if this cannot be found out, such as on a file system without locks. Changes no file, as acquiring a FileLock would.
    """
    try:
        with open(folder / LOCK, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def mean_metrics(found: list[dict[str, float]]) -> dict[str, float]:
    """Return the mean of every metric over the sites that report it."""
    names = dict.fromkeys(name for metrics in found for name in metrics)
    return {name: statistics.fmean(metrics[name] for metrics in found if name in metrics) for name in names}


def payload_bytes(tensors: Tensors) -> int:
    """Return the size in bytes of the tensors' values, without names or headers."""
    return sum(t.numel() * t.element_size() for t in tensors.values())


def incompatible_version(folder: Path) -> str:
    """Return the version of Consilium that made a run; "" if its minor version is this one's or versions.json lacks it."""
    told = str(read_json(folder / VERSIONS).get("consilium", "")).split(THEN)[-1]
    return shown(told, 40) if told.split(".")[:2] != __version__.split(".")[:2] else ""


def versions() -> dict[str, str]:
    """Return the versions of Python, the platform and the packages on which a run's numbers depend."""
    found = {"python": platform.python_version(), "platform": platform.platform(), "consilium": __version__}
    # a package may be in the job's app/custom instead
    return found | {name: installed_version(name) or "not installed" for name in PACKAGES if name not in found}
