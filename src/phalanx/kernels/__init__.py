"""Kernels: parts of a step that are faster written for the device, each beside its plain twin.

A twin is what runs on processors, and what a proof proves; a kernel is held against it. Every file chooses between its
two by the tensors that it is given, and has no other knowledge of how a model is spread.
"""
