"""CPU path in Numba: one module per operation, from tensors to compiled code.

Importing it needs numba; the package above decides whether to. Callers have checked devices, dtypes
and head_dim. Kernels take addresses instead of arrays: turning one bfloat16 tensor into a NumPy
array costs as much as a whole small call, and a kernel over addresses compiles once for all shapes.
"""
