"""The networks that propose, and their checkpoint format."""
