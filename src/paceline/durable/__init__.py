"""Bytes that survive: file-system seam, journal, stores, checksums, the error tree. No torch."""
