"""What each axis does to a model: tensor (tp), context (cp), pipeline (pp) and expert parallelism (ep), batch-norm.

For each: what is cut and where (a plan), and the modules changed so that they compute with their part of it.
"""
