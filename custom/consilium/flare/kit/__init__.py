"""Startup kits: provisioning, certificates, revocation, local settings and checks."""
