"""What is done around a block's forward: layers, in one order, in one wrapper a block.

A block is a layer of a model that repeats. `wrapper` replaces forwards, `assembly` says which layers a block gets;
`boundary`, `recompute` and `probe` are some of them, and `activations` is the value that says what is sharded how.
"""
