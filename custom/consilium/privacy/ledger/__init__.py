"""A site's privacy ledger: entries, audit, recovery."""
