"""Seeds derived by purpose."""

from consilium.core.seeding import seed_for


def test_seeds_are_pinned_and_parts_do_not_run_together() -> None:
    assert seed_for(0, "train", 1, 0, "site-1") == 8009729510655529602
    assert seed_for(0, "a", "b") == seed_for(0, "a", "b")
    assert len({seed_for(0, "ab", "c"), seed_for(0, "a", "bc"), seed_for(1, "ab", "c"), seed_for(0, "c", "ab")}) == 4
    assert 0 <= seed_for(0) < 2**63
