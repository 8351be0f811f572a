"""A training run on disk, such that going on gives the same bits."""
