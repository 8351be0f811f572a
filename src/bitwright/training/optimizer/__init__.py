"""Stepping any elementwise optimizer on parameters and moments that are narrower than fp32."""
