"""Rules of storing an update, one file each; each module defines UPDATES."""
