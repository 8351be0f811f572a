"""Weights that stay packed codes: what multiplies with them and why, and what happens where inputs overflow."""
