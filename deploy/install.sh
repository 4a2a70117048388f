#!/bin/sh
# Installs Trident into the Python that a Triton server runs: both packages, with their CPU kernels
# compiled and the default models fetched, so that a server starts at once and without a network.
#
#   PYTHON           the interpreter; the one on PATH if not given
#   STUB             the server's program that runs Python models
#   TRIDENT_HOME     where the models go
#   NUMBA_CACHE_DIR  where compiled kernels go
#   SERVER_USER      who may write to these two: a server on another CPU compiles kernels anew
set -eu

: "${TRIDENT_HOME:?}" "${NUMBA_CACHE_DIR:?}"
PYTHON=${PYTHON:-python3}
STUB=${STUB:-/opt/tritonserver/backends/python/triton_python_backend_stub}
source=$(cd "$(dirname "$0")/.." && pwd)
# In an image the system's Python is the server's own.
export PIP_BREAK_SYSTEM_PACKAGES=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore

# Stubs built before numpy 2 misread its arrays; one that knows it holds this name.
numpy='numpy'
if ! grep -q numpy._core "$STUB"; then
  numpy='numpy<2'
fi

"$PYTHON" -m pip install torch==2.13.0 "$numpy" # the tested version of torch
"$PYTHON" -m pip install "$source" "$source/client" "$numpy"
cd / # so that what was installed is what runs
"$PYTHON" -m trident_kernels.cpu.compile
"$PYTHON" -m trident_llm.model.default_model
if [ -n "${SERVER_USER:-}" ]; then
  chown -R "$SERVER_USER" "$TRIDENT_HOME" "$NUMBA_CACHE_DIR"
fi
