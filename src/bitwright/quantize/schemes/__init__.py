"""Named presets, one file a family; each module defines SCHEMES."""
