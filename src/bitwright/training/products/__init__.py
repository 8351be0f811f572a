"""Linear layers whose three products are of codes: recipes, operands, kernels."""
