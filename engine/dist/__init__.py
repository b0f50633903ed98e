"""Several ranks: who they are, what they exchange, and how they start and end together."""
