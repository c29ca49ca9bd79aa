"""``fairlane predictor``: train, evaluate and inspect length models without a control plane."""
