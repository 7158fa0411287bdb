"""The checks of `paceline doctor`, a module for each kind."""
