"""Tenants and what they need as a file: ``fairlane apply`` makes the control plane as it says, ``export`` writes it."""
