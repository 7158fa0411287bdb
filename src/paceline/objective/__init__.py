"""Losses and position weights."""
