"""Training loops of other libraries under a policy: one file a library, imported only by who uses it."""
