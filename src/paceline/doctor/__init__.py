"""What will go wrong, found before anything is loaded: `plan` and `doctor`."""
