"""One engine's checkpoint a file; each module defines EXPORTERS."""
