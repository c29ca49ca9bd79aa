"""Tenant keys: issued once, kept as a digest, revoked for good."""
