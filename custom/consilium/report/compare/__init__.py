"""Runs beside each other: what compares, means and how sure they are, paired tests, tables, pictures."""

from enum import StrEnum


class Test(StrEnum):
    """How two methods are compared, see paired.py."""

    WILCOXON = "wilcoxon"
    PERMUTATION = "permutation"
