"""The target over the corpus, its hidden states into the store."""
