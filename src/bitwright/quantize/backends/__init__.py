"""The same arithmetic on different machines, equal bit for bit."""
