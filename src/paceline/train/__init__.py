"""The drafter, trained on a channel of features."""
