"""Published measurements of others, and how each source is predicted; `../comm_accuracy.py` runs them all."""
