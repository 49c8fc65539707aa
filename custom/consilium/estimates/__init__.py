"""Estimates of a job's FLOPs, memory and communication before it runs."""
