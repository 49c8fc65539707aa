"""Accounting of epsilon: accountants, composition of releases, calibration of noise."""
