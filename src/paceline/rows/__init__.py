"""Rows out of whatever files people have, and the conversations in them."""
