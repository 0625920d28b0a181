"""What goes through a module's forward: the layers around it, its residual stream, how activations are sharded.

Below all that changes a model. `wrapper.wrap` is the one place where a forward is replaced.
"""
