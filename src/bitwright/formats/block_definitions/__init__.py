"""One file a family of block formats; each defines BLOCK_FORMATS, a tuple of records. See CONTRIBUTING.md."""
