"""A KV cache that holds codes."""
