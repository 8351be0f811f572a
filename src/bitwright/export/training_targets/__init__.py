"""What training programs read of a plan: one file a program; each module defines TRAINING_TARGETS."""
