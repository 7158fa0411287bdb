"""Acceptance, measured by decoding."""
