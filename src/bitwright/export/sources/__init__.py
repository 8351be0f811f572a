"""Kinds of quantised checkpoints that can be imported, one a file; each defines SOURCES (`export/importer.py`)."""
