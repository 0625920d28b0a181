"""A rank's weights: described, filled, held, gathered before use (ZeRO 3), and their gradients summed.

`holding` says who holds which part of a weight; `bucket` packs rows that travel; `shard` and `replicate` send them.
"""
