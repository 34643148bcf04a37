"""CUDA for mx: a small typed driver layer, rings of pinned memory, digests on the device.

Everything uses the Protocol in `driver`, which `bindings` implements with the CUDA driver. Nothing
here is imported, and `cuda.bindings` is not searched for, before a GPU is used.
"""
