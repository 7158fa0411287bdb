"""Lossless decoding: trees, verification, caches, generation."""
