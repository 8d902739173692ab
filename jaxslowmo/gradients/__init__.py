"""Transforms of gradients before the optimizer: averaging, sums of rows, scaling, clipping."""
