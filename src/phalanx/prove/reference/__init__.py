"""The task on one device: made hostile, run by a plain loop, with what would make right layouts differ taken out."""
