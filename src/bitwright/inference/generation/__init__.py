"""Text from a model, token by token, and how fast."""
