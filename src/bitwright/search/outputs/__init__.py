"""What of a model is compared, one file each: a module defines OUTPUTS, a tuple of `OutputKind`."""
