"""Who may import whom. The layering of the code is a promise to its readers; this keeps it."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# What each room may import besides the standard library and itself.
ALLOWED = {
    "backend/trident_llm/core": set(),
    "backend/trident_llm/text": {
        "trident_llm.core", "tokenizers", "jinja2", "transformers", "numpy", "xgrammar",
    },
    "backend/trident_llm/model": {
        "trident_llm.core", "trident_kernels", "torch", "numpy", "safetensors", "gguf", "tokenizers",
    },
    "backend/trident_llm/engine": {
        "trident_llm.core", "trident_llm.text", "trident_llm.model", "numpy",
    },
    "backend/trident_llm/serving": {
        "trident_llm.core", "trident_llm.text", "trident_llm.engine", "trident_llm.model", "numpy",
        "triton_python_backend_utils",
    },
    "backend/trident_llm/cli": {
        "trident_llm.core", "trident_llm.model.config", "trident_llm.model.default_model",
        "trident_llm.model.encoder_config", "trident_llm.model.pooling_config",
    },
    "kernels/trident_kernels": {"torch", "triton", "numba", "llvmlite", "numpy"},
    "client/trident_client": {"tritonclient", "grpc", "numpy", "google.protobuf"},
    "client/trident_client/openai": {
        "trident_client", "fastapi", "starlette", "pydantic", "uvicorn", "h11",
    },
}  # fmt: skip

# Modules that a process loads before it knows whether it needs torch.
LIGHT = ["core", "text", "engine", "serving", "cli"]
HEAVY = {"torch", "transformers", "numba", "xgrammar"}


def imports(path: Path, *, top_level: bool) -> set[str]:
    """Modules that a file names; ``top_level`` leaves out imports inside functions."""
    tree = ast.parse(path.read_text())
    found: set[str] = set()
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module)
        inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        checking = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if not (top_level and (inside or checking)):
            pending += ast.iter_child_nodes(node)
    return found


def is_in(module: str, packages: set[str]) -> bool:
    return any(module == name or module.startswith(name + ".") for name in packages)


def is_standard(module: str) -> bool:
    return module.split(".")[0] in sys.stdlib_module_names or module == "__future__"


@pytest.mark.parametrize("room", ALLOWED)
def test_a_room_imports_only_what_it_may(room: str) -> None:
    own = room.split("/", 1)[1].replace("/", ".")
    rooms_inside = [ROOT / other for other in ALLOWED if other.startswith(room + "/")]
    files = [
        path
        for path in sorted((ROOT / room).rglob("*.py"))
        if not any(path.is_relative_to(inside) for inside in rooms_inside)
    ]
    assert files
    for path in files:
        for module in imports(path, top_level=False):
            # The package itself holds nothing but its version.
            allowed = is_standard(module) or module == own.split(".")[0]
            allowed = allowed or is_in(module, {own, *ALLOWED[room]})
            assert allowed, f"{path.relative_to(ROOT)} must not import {module}"


def test_the_gateway_uses_only_what_the_client_package_offers() -> None:
    for path in (ROOT / "client/trident_client/openai").rglob("*.py"):
        for module in imports(path, top_level=False):
            if is_in(module, {"trident_client"}):
                assert module == "trident_client" or is_in(module, {"trident_client.openai"}), path


def test_the_gateway_needs_its_extra_only_when_it_runs() -> None:
    """The command's options, which every `trident-client` has, load nothing of it."""
    for name in ("command", "settings"):
        path = ROOT / f"client/trident_client/openai/{name}.py"
        extra = {"fastapi", "starlette", "pydantic", "uvicorn"}
        assert not {module.split(".")[0] for module in imports(path, top_level=True)} & extra


def test_the_model_repository_names_serving_and_nothing_else() -> None:
    named = {
        path.parent.parent.name: imports(path, top_level=False)
        for path in (ROOT / "model_repository").rglob("*.py")
    }
    assert named == {
        "llm": {"trident_llm.serving.model"},
        "embed": {"trident_llm.serving.embedding_model"},
    }


@pytest.mark.parametrize("room", LIGHT)
def test_heavy_libraries_are_not_loaded_by_importing(room: str) -> None:
    for path in (ROOT / "backend/trident_llm" / room).rglob("*.py"):
        heavy = {m for m in imports(path, top_level=True) if m.split(".")[0] in HEAVY}
        heavy |= {
            m for m in imports(path, top_level=True)
            if m.startswith("trident_llm.model")
            and m not in ("trident_llm.model.config", "trident_llm.model.default_model")
        }  # fmt: skip
        assert not heavy, f"{path.relative_to(ROOT)} loads {heavy}"


def test_nothing_imports_the_benchmarks_or_the_tests() -> None:
    for room in ("backend", "kernels", "client", "model_repository"):
        for path in (ROOT / room).rglob("*.py"):
            roots = {module.split(".")[0] for module in imports(path, top_level=False)}
            assert not roots & {"perf", "tests"}, path
