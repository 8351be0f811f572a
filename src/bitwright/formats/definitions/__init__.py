"""One file a family of number formats; each defines FORMATS, a tuple of records. See CONTRIBUTING.md."""
