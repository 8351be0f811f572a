"""One family of value schemes a file; each module defines VALUE_SCHEMES."""
