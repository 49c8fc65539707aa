"""The server's side of secure aggregation over a run: the roster, and one attempt at a phase after another."""

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from cryptography import x509

from consilium.config.job import JobConfig
from consilium.core.errors import Reason, RefusedError
from consilium.core.storage import write_atomic
from consilium.privacy.secagg.roster import admit
from consilium.privacy.secagg.server import Attempt
from consilium.privacy.secagg.terms import Message, Place, terms_of


class Collector:
    """All attempts of one run, in a folder of its own. `root`: of the server's kit; `server`: its name, which no site has."""

    def __init__(self, folder: Path, config: JobConfig, run: str, root: x509.Certificate, server: str) -> None:
        self.folder, self.config, self.run, self.root, self.server = folder, config, run, root, server
        path = folder / "roster.json"
        self.roster: dict[str, Message] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

    def hello_question(self) -> Message:
        """Return what a site is asked once."""
        return {"step": "hello"}

    def admit(self, name: str, found: Message) -> None:
        """Take a site into the roster. Raises RefusedError for an entry that breaks a rule, or is not the one before."""
        admit(self.root, self.server, found, self.config.digest, self.run, name)
        if self.roster.get(name, found) != found:
            raise RefusedError("it has another key than before in this run; is its state lost?", Reason.TASK)
        if any(found["key"] == other["key"] for who, other in self.roster.items() if who != name):
            raise RefusedError("it has another site's key", Reason.TASK)
        self.roster[name] = found
        write_atomic(self.folder / "roster.json", json.dumps(self.roster).encode())

    @property
    def has_begun(self) -> bool:
        """Whether a phase has been begun: then the roster is one that sites have been shown."""
        return (self.folder / "past.json").is_file() or any(self.folder.glob("*-*-*/about.json"))

    def stored(self, round: int, phase: int) -> Attempt | None:
        """Return the last attempt at a phase that this run has begun, None without one; those of other phases go."""
        wanted = f"{round}-{phase}-"
        for path in self.folder.glob("*-*-*/") if self.folder.is_dir() else ():
            if not path.name.startswith(wanted):
                shutil.rmtree(path)
        found = sorted(self.folder.glob(f"{wanted}*/about.json"), key=lambda p: int(p.parent.name.rsplit("-", 1)[1]))
        return self._open(found[-1].parent) if found else None

    def _open(self, folder: Path) -> Attempt:
        return Attempt(folder, self.config, self.run, json.loads((folder / "about.json").read_text(encoding="utf-8")))

    def begin(self, round: int, phase: int, cohort: Iterable[str]) -> Attempt:
        """Begin a phase's first attempt. Raises RefusedError where its terms would protect nobody."""
        return self._begin(Place(round, phase), sorted(cohort), self.roster, {})

    def _begin(self, place: Place, cohort: list[str], roster: Mapping[str, Message], cancelled: Mapping[str, str]) -> Attempt:
        terms_of(self.config, len(cohort))
        about = {"place": [place.round, place.phase, place.attempt], "cohort": cohort, "cancelled": dict(cancelled)}
        folder = self.folder / str(place)
        write_atomic(folder / "about.json", json.dumps(about | {"roster": dict(roster)}).encode())
        return self._open(folder)

    def again(self, last: Attempt) -> Attempt:
        """Begin a new attempt after one that is cancelled, of the same sites and roster."""
        place = Place(last.place.round, last.place.phase, last.place.attempt + 1)
        cancelled = {name: one["signature"] for name, one in sorted(last.answers.of("cancel").items())}
        return self._begin(place, last.cohort, last.roster, cancelled)

    def past(self, name: str) -> Message:
        """Return the proof of the last phase that a site was sent a model in, {} without one."""
        kept = self._past()
        return dict(kept["proofs"].get(kept["of"].get(name), {}))

    def _past(self) -> Message:
        path = self.folder / "past.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"proofs": {}, "of": {}}

    def prove(self, last: Attempt, proof: Message) -> None:
        """Keep the proof of a phase, for all that were sent a model in any attempt at it."""
        kept, phase = self._past(), f"{last.place.round}-{last.place.phase}"
        for path in self.folder.glob(f"{phase}-*/parties.json"):
            kept["of"] |= dict.fromkeys(json.loads(path.read_text(encoding="utf-8")), phase)
        proofs = kept["proofs"] | {phase: proof}
        kept["proofs"] = {one: proofs[one] for one in set(kept["of"].values()) if one in proofs}
        write_atomic(self.folder / "past.json", json.dumps(kept).encode())

    def forget(self, last: Attempt) -> None:
        """Remove a phase that has ended: what it summed is in the server's state."""
        for path in self.folder.glob(f"{last.place.round}-{last.place.phase}-*"):
            shutil.rmtree(path)
