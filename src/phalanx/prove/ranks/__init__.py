"""What ranks do for a proof: train, hold each step against the reference, be interrupted and go on, record one step."""
