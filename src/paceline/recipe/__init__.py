"""What to do: the recipe, its fingerprints, the run directory and the stages' records. No torch."""
