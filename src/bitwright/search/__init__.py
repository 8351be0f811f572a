"""Choosing: calibrate, score, probe, solve, mend, prove. `optimize.py` reads like that sentence."""
