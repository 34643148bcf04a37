"""CUDA as mx uses it: a small typed driver layer, rings of pinned memory, digests on the device.

`driver` is the seam: everything else is written against its Protocol, which `bindings` fulfils
with the CUDA driver and `tests.support.fake_cuda` with host memory. Nothing here is imported, and
`cuda.bindings` is not looked for, before something asks for a GPU.
"""
