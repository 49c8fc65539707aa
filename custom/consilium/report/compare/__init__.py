"""Compare runs: which runs are comparable, means and their intervals, paired tests, tables and pictures."""

DIAGNOSED = {
    "drift_between": "drift/cross",
    "drift_absolute": "oracle drift/absolute",
    "drift_relative": "oracle drift/relative",
    "memory_saturation": "memory/saturation",
    "information_gain": "ranks/information_gain",
}
"""Published numbers that are not scores, each with the name of its diagnostic in metrics.jsonl."""
HELD_OUT = "held_out_"
"""Prefix of a published validation score, taken before the last round, of the sites that it did not ask to train."""
MARK = "*"
"""Suffix of a mean from which seeds are missing."""
MOST_LISTED = 20
"""Lines of one kind that a table lists, at most, such as missing runs. A note counts the others."""
COLUMN, PAGE = 3.5, 7.16
"""Widths in inches of a column and of a page in a two-column paper."""
