"""A site's privacy ledger, and the record of everything that left the site."""
