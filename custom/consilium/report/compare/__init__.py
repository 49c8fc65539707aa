"""Runs beside each other: what compares, means and how sure they are, paired tests, tables, pictures."""

from typing import Literal

Test = Literal["wilcoxon", "permutation"]
"""How two methods are compared, see scores.py."""
DIAGNOSED = {
    "drift_between": "drift/cross",
    "drift_absolute": "oracle drift/absolute",
    "drift_relative": "oracle drift/relative",
    "memory_saturation": "memory/saturation",
    "information_gain": "ranks/information_gain",
}
"""Printed numbers that no score is, and what a run calls them that measures them of itself (metrics.jsonl)."""
HELD_OUT = "held_out_"
"""Stands before a score that was printed of validation data at sites not asked to train, before the last round's training."""
COLUMN, PAGE = 3.5, 7.16
"""Inches: widths of a column and of a page of two."""
