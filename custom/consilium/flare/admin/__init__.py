"""Commands of administrators: sessions, submission, metrics, evidence."""
