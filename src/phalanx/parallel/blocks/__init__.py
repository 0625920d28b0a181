"""A block as a whole: which layers stand around it and in which order, where the first begins and the last ends.

A block is a layer of a model that repeats; the axes act inside it. `assembly` puts the layers together.
"""
