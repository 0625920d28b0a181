"""The page of a run, live and as a report: its events as columns, thinned to what a screen shows."""
