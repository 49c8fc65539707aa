"""Startup kits: provisioning, certificates, revocation, local settings, checks."""
