"""The exact numerics of a plan, on any device: what each of its sites runs with, in models and in programs."""
