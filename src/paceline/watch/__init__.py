"""Events that every floor writes, and the readers that answer from files alone. No torch."""
