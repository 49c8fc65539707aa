"""Secure aggregation: the server learns the sum of the sites' updates and nothing else about any update.

This package uses neither FLARE nor the network. The protocol is K. Bonawitz et al., "Practical Secure Aggregation for
Privacy-Preserving Machine Learning", CCS 2017, in its variant against an active adversary, on the integers of the exact mean.
The masks depend on everything that the server sent (D. Pasquini et al., "Eluding Secure Aggregation in Federated Learning via
Model Inconsistency", CCS 2022). So masks do not cancel between sites that were sent different models. Durable records,
cancelled attempts, and the certificates of FLARE's kits as identities are our additions.

A phase (of a round) has one or more attempts. The steps of an attempt, in order:

    prepare   each site of the cohort sends a signed mask key, the hash of a self-mask seed, and sealed shares of both secrets
    train     each party (a site that prepared) trains, masks its update over all parties, and sends it
    confirm   each survivor (a site whose masked update arrived) signs the list of survivors
    reveal    each survivor sends shares: of the seeds of survivors, and of the mask keys of the other parties

`hello` comes before them, once per run: each site sends its key for the run, and the roster lists all of them. If too few sites
remain, sites sign `cancel`, and a new attempt begins.
"""
