"""Curves of a training in W&B, trackio, TensorBoard and MLflow; none of them can stop it."""
