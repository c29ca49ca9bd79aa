"""Tenants: who shares the platform, by which weight, in which tiers."""
