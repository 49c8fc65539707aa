"""A server that would know for nothing how training went: by zeros, by a disk with little room, by a hello."""

from dataclasses import replace

import torch
from nvflare.apis.fl_context import FLContext

from consilium.errors import Reason
from consilium.flare import filters, wire
from tests.adversary.server.conftest import SITE_LEVEL, Client, MakeClient
from tests.adversary.server.test_words import failing
from tests.conftest import small_config


def test_a_release_of_zeros_costs_what_any_does(client: MakeClient) -> None:
    """DEeR's A with B = 0 leaves as zeros, which cost nothing: each told that training on the A sent had not overflowed."""
    more = {"training": small_config("deer", rounds=3).model_dump()["training"]}
    sites = [client(SITE_LEVEL, "deer", f"job-{number}", more=more) for number in range(3)]
    told = [_asked_with_zeros(site, f"run-{n}") for n, site in enumerate([*sites[:2], failing(sites[2])])]
    assert told == [None, None, Reason.TRAINING]
    assert [(row.phase, row.count) for row in sites[0].guard.ledger.entries()] == [(1, 1)] * 3


def _asked_with_zeros(site: Client, run: str) -> Reason | None:
    sent = site.broadcast(0, 1)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in sent.tensors.items()}
    filters._guards[None, FLContext().get_identity_name()] = site.guard
    return wire.reason_of(site.ask("train", wire.encode(replace(sent, tensors=zeros), run, update=False)))
