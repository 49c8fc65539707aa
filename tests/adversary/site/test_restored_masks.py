"""A hospital whose record of masks was restored from a backup, and a server that asks it again, to open a second sum.

The first sum is of all four. The second lacks a: the difference would be a's update. The restored hospital has forgotten its
answers, and a colluding one answers whatever it is asked, so a threshold of 3 needs one that remembers.
"""

import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from consilium.core.errors import ConsiliumError
from consilium.privacy.secagg.certificates import Identity
from consilium.privacy.secagg.server import Attempt
from tests.privacy.secagg.conftest import NAMES, Net, identities, keys, secure_config

assert identities  # fixtures
assert keys
WITHOUT = NAMES[1:]
FORGETFUL = ("b", "c")


class Backup:
    """Copies the folders of the server and of those who forget, at one step of the first attempt."""

    def __init__(self, net: Net, when: str) -> None:
        self.net, self.when, self.place = net, when, net.folder.parent / "backup"

    def at(self, step: str) -> None:
        for name in ("server", *FORGETFUL) if step == self.when else ():
            shutil.copytree(self.net.folder / name, self.place / name)

    def restore(self) -> None:
        for name in ("server", *FORGETFUL):
            shutil.rmtree(self.net.folder / name)
            shutil.copytree(self.place / name, self.net.folder / name)
        self.net.parties |= {name: self.net.party(name) for name in FORGETFUL}
        self.net.collector = self.net.new_collector()


def signers(net: Net, attempt: Attempt) -> set[str]:
    """Ask all for a sum without a; return who has signed it. Who refuses a step is asked the next one all the same."""
    signed = set[str]()
    for name in NAMES:
        with suppress(ConsiliumError):
            attempt.take_prepared(name, net.parties[name].answer(attempt.prepare_question()))
    parties = attempt.close_prepared()
    for name in WITHOUT:
        with suppress(ConsiliumError):
            attempt.take_masked(name, net.masked(attempt, name, net.task(attempt, name, parties)))
        with suppress(ConsiliumError):
            net.parties[name].answer(attempt.question("confirm", survivors=WITHOUT))
            signed.add(name)
    return signed


@pytest.mark.parametrize("when", ["hello", "prepare", "train", "confirm"])
def test_one_restored_hospital_and_a_colluding_one_open_no_second_sum(
    when: str, tmp_path: Path, identities: dict[str, Identity]
) -> None:
    net = Net(tmp_path / "net", identities, secure_config(threshold=3, colluders=1))
    backup = Backup(net, when)
    net.meet()
    backup.at("hello")
    attempt = net.collector.begin(0, 0, net.collector.roster)
    parties = net.prepare(attempt)
    backup.at("prepare")
    survivors = net.train(attempt, parties, NAMES)
    backup.at("train")
    net.confirm(attempt, parties, survivors, NAMES)
    backup.at("confirm")
    net.reveal(attempt, parties, NAMES)
    assert net.opened(attempt, parties, survivors)[0]["w"].equal(net.plain(NAMES)[0]["w"])
    backup.restore()
    again = net.collector.begin(0, 0, net.collector.roster)
    signed = signers(net, again)
    assert signed == (set() if when == "confirm" else set(FORGETFUL))  # who has signed the first sum signs no other
    assert len(signed) < again.terms.threshold  # so nobody who remembers reveals a share for it
