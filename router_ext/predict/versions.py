"""Versions that processes without numpy compare."""

FEATURE_VERSION = 2
"""Of ``features``: stored with every sample and every model, and raised with anything there that changes a number."""
