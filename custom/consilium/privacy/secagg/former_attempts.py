"""What a site asks of the phase before it goes on to the next: proof that others were sent there what it was sent itself.

A site's update, its local tensors and its optimizer's state remember what it was sent. Were a phase never opened, a server
could send one site a model of its own there, and read what that left behind from a later sum in which all have one model.
"""

from collections.abc import Callable, Mapping
from typing import Any

from consilium.privacy.secagg.arithmetic import Layout
from consilium.privacy.secagg.messages import Keys, check_confirmed, check_survivors
from consilium.privacy.secagg.terms import Message, Place, Terms, is_field, mask_context, refused

TRAINED = "trained"
"""Where a site's record has the phase that it was sent a model in last, the model's hashes, and whether that is proved."""


def note_trained(values: dict[str, Any], place: Place, order: Layout, sent: Message, rounds: int) -> None:
    """Note what a site is sent to train, in a job of so many rounds.

    Raises RefusedError where a new attempt at a phase sends another model: the update stays the one from the first.
    """
    phase, told = [place.round, place.phase], {"order": [[name, list(shape)] for name, shape in order], "sent": sent}
    before = values.get(TRAINED)
    if not before or before["phase"] != phase:
        values[TRAINED] = {"phase": phase, "attempt": place.attempt, "told": told, "proved": False, "rounds": rounds}
    elif place.attempt != before["attempt"] and before["told"] != told:
        raise refused("a new attempt sends another model than the last, from which this site's update is")


def note_proved(values: dict[str, Any]) -> None:
    """Note that enough sites have confirmed the sum of the last phase on what this site was sent."""
    values[TRAINED]["proved"] = True


def is_open(values: Mapping[str, Any], place: Place) -> bool:
    """Tell whether this site was sent a model in an earlier phase, and does not know that others were sent the same."""
    last = values.get(TRAINED)
    return last is not None and not last["proved"] and last["phase"] != [place.round, place.phase]


def check_past(values: dict[str, Any], past: Any, terms: Terms, keys: Keys, context: Callable[[Place], bytes]) -> None:
    """Raise RefusedError unless enough sites have confirmed a sum of the last phase on what this site was sent.

    `past`: the attempt that was opened, its mask keys, survivors and confirmations; `context`: of an attempt at that phase.
    """
    last = values[TRAINED]
    said = past if isinstance(past, dict) else {}
    attempt, prepared = said.get("attempt"), said.get("keys")
    if type(attempt) is not int or not isinstance(prepared, dict):
        raise refused("the last phase has no proof that other sites were sent the same model; it is to be opened first")
    if not all(map(is_field, prepared.values())) or not prepared.keys() <= set(keys):
        raise refused("the proof of the last phase has mask keys of other sites")
    order: Layout = [(one, tuple(shape)) for one, shape in last["told"]["order"]]
    round, phase = map(int, last["phase"])
    place = Place(round, phase, attempt)
    masks = mask_context(context(place), prepared, order, last["told"]["sent"])
    survivors = check_survivors(said, None, prepared, terms)
    check_confirmed(said, masks, survivors, terms, keys)
    note_proved(values)
