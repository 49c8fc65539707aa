"""Names of classes that look like a mistake: two spellings of one, an empty cell, one for every sample."""

from collections.abc import Iterator, Mapping

from consilium.data.identifiers import loose

EMPTY = frozenset({"", "nan", "null", "n/a", "#n/a", "<na>"})
"""What programs write for an empty cell, in lower case."""
DOUBTFUL = frozenset({*EMPTY, "na", "none", "nil", "-", "?", ".", "unknown"})
FEW = 10
"""Below so many samples, a class for each may be meant."""
SPELLINGS = "classes that differ by case, blanks or punctuation alone"
NO_NAME = "class that looks like an empty cell"
EACH_ITS_OWN = "as many classes as samples"


def doubts(counts: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yield (kind, line) for doubtful names of classes, of which `counts` says how many samples each has."""
    alike: dict[str, list[str]] = {}
    for name in sorted(counts):
        alike.setdefault(loose(name), []).append(name)
    for names in alike.values():
        if len(names) > 1:
            yield SPELLINGS, " ~ ".join(f"{name!r} ({counts[name]})" for name in names)
    for name in sorted(counts):
        if name.strip().lower() in DOUBTFUL:
            yield NO_NAME, f"{name!r} ({counts[name]})"
    if len(counts) == sum(counts.values()) >= FEW:
        yield EACH_ITS_OWN, f"{len(counts)}: no class has a second sample, so none can be learned and tested"
