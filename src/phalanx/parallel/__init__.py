"""A model spread over ranks.

`spread` takes a model apart and gives every rank its part of it. Below it: `blocks` (what is done around a block),
`weights` (which rank holds what of each weight, and how it travels), `axes` (what tp, cp, pp and ep do to a model),
`randomness` (draws that do not depend on the ranks) and `communication` (the ranks' mesh and its collectives).
"""
