"""Compile caches and CUDA graphs that travel with a model's weights: signed, bounded, off by
default."""
