"""Where a rank's time and memory go, recorded for a few steps, or when there is no memory left."""
