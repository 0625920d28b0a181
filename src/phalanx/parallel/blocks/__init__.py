"""What is done around a block's forward: computed again in backward, tried once before the first step.

A block is a layer of a model that repeats; the axes act inside it, and what is in here acts on it as a whole.
"""
