"""Epsilon: accountants, composition, calibration of noise."""
