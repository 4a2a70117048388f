"""Stands in for the module that Triton gives a model, which exists only inside its stub process."""

from __future__ import annotations

import sys
import types

module = types.ModuleType("triton_python_backend_utils")
sys.modules.setdefault("triton_python_backend_utils", module)
