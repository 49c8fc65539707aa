"""Administrators' actions: sessions, submissions, metrics, evidence."""
