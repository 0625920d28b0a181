"""Random numbers that are the same under every layout.

A draw is keyed by step, block, call and sample, never by rank; torch's own random functions are led to these draws.
"""
