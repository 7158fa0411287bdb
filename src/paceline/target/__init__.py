"""The frozen LLM: what it is, its hidden states, its head."""
