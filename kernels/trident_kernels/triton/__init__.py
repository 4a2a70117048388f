"""The operations as Triton kernels, for CUDA devices and, for checks, Triton's interpreter.

One file per operation; `configs` holds tile sizes per architecture, `runtime` how kernels start.
"""
