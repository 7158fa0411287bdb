"""Regeneration through servers: what they are asked, what is kept of it, and where."""
