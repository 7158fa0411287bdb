"""From conversations to tokens with a loss mask, and to answers of the target itself."""
