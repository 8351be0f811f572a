"""Training policies, one file each; each module defines POLICIES."""
