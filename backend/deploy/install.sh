#!/bin/sh
# Installs Trident for the python3 on PATH, which must be the one that Triton's Python backend runs:
# in a stock tritonserver image it is. Run from the root of the sources.
#
#   PYTHON   another interpreter (default: python3)
#   TORCH    the torch to install (default: the tested one)
set -eu
PYTHON=${PYTHON:-python3}
# numpy 1: the Python backend of older releases reads numpy's arrays as numpy 1 lays them out.
"$PYTHON" -m pip install --no-cache-dir "${TORCH:-torch==2.13.0}" 'numpy<2'
"$PYTHON" -m pip install --no-cache-dir . ./client 'numpy<2'
# The CPU kernels are compiled once here, so that no start has to.
"$PYTHON" -m trident_kernels.cpu.compile
