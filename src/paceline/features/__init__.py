"""Hidden states at rest: plan, shards, order, reader."""
