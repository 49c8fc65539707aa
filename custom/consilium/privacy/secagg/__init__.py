"""Secure aggregation: the server learns the sum of the sites' updates and nothing else of any. Pure: no FLARE, no network.

K. Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017, in its variant against an
active adversary, on the integers of the exact mean. Masks depend on all that the server sent (D. Pasquini et al., "Eluding
Secure Aggregation in Federated Learning via Model Inconsistency", CCS 2022), so sites that were sent different models get masks
that do not cancel. Ours: durable records, cancelled attempts, and certificates of FLARE's kits as identities.
"""
