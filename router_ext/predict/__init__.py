"""Prediction of output lengths: the fallback without torch (``baseline``) and the artifact format (``artifact``).

``Baseline`` is what a router predicts with: loaded from an artifact by digest, swapped by assignment, never mutated.
``build_baseline`` is what the control plane's training job calls. Both sides need the standard library and msgspec.
"""
