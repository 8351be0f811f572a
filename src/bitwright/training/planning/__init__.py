"""A training plan from one short run that was looked at."""
