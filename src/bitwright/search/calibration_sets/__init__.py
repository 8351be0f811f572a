"""Built-in sets of documents, one file each: a module defines CALIBRATION_SETS, a tuple of `CalibrationSet`."""
