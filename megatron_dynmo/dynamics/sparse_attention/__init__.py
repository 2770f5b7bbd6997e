"""Attention within hash buckets: hashing, the blocks that are computed, kernels."""
