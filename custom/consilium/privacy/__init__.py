"""Privacy: accounting, DP-SGD, noise, the guard and the ledger of a site, and secure aggregation."""
