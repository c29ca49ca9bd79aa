"""Fairness policies: whose turn it is. One file per policy, named as in the configuration."""
