"""What shipped code must never do, whoever asks: run data as code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SHIPPED = [
    path
    for folder in ("backend/trident_llm", "kernels/trident_kernels", "client/trident_client",
                   "model_repository")
    for path in sorted((ROOT / folder).rglob("*.py"))
]  # fmt: skip
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
CALLS = {
    "eval", "exec", "compile", "__import__", "torch.load", "yaml.load", "yaml.unsafe_load",
    "numpy.load", "np.load", "os.system", "os.popen", "pickle.loads", "pickle.load", "input",
}  # fmt: skip
# Options that turn a harmless call into one of those.
KEYWORDS = {"shell", "allow_pickle", "trust_remote_code"}


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def dangers(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        yield from (name for name in names if name.split(".")[0] in MODULES)
        if not isinstance(node, ast.Call):
            continue
        if dotted(node.func) in CALLS:
            yield dotted(node.func)
        for keyword in node.keywords:
            off = isinstance(keyword.value, ast.Constant) and not keyword.value.value
            if keyword.arg in KEYWORDS and not off:
                yield f"{keyword.arg}="


def test_all_packages_are_looked_at() -> None:
    assert len(SHIPPED) > 100


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_data_is_run_as_code(path: Path) -> None:
    assert list(dangers(path.read_text())) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "from pickle import loads", "import joblib.memory", "eval('1')",
        "exec(text)", "torch.load(path)", "yaml.load(text)", "np.load(file)",
        "np.array(x, allow_pickle=True)", "subprocess.run(command, shell=True)",
        "from_pretrained(path, trust_remote_code=flag)",
    ],
)  # fmt: skip
def test_each_would_be_found(source: str) -> None:
    assert list(dangers(source))


def test_what_is_harmless_is_not() -> None:
    assert not list(dangers("model.eval()\nre.compile('x')\nrun(shell=False)\nsafe_load(x)"))
