"""The Dockerfile, followed line by line into a folder, with a virtual environment for its Python."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.e2e.stock_client import make_inputs, run, strings
from tests.e2e.stock_server import StockServer
from trident_llm.cli.triton_server import find_tritonserver

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
Instructions = list[tuple[str, str]]


@pytest.fixture(scope="module")
def dockerfile() -> Instructions:
    text = re.sub(r"(?m)^#.*\n", "", (ROOT / "Dockerfile").read_text()).replace("\\\n", " ")
    parts = [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]
    return [(name, rest.strip()) for name, rest in parts]


def all_of(dockerfile: Instructions, name: str) -> list[str]:
    return [rest for each, rest in dockerfile if each == name]


def dockerignore() -> list[str]:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_it_is_made_for_the_stock_server(dockerfile: Instructions) -> None:
    known = {
        "ARG", "FROM", "ENV", "COPY", "RUN", "USER", "EXPOSE", "HEALTHCHECK", "CMD",
    }  # fmt: skip
    assert {name for name, _ in dockerfile} == known
    assert re.fullmatch(r"TRITON_IMAGE=\S+/tritonserver:\S+-py3", dockerfile[0][1])
    assert dockerfile[1] == ("FROM", "${TRITON_IMAGE}")
    assert all_of(dockerfile, "EXPOSE") == ["8000 8001 8002"]
    (user,) = all_of(dockerfile, "USER")
    assert f"SERVER_USER={user}" in " ".join(all_of(dockerfile, "ENV"))
    assert not user.startswith("0")


def test_the_tested_torch_is_installed() -> None:
    script = (ROOT / "deploy" / "install.sh").read_text()
    (installed,) = re.findall(r"torch==([\d.]+)", script)
    (tested,) = re.findall(r"^TORCH := torch.*?([\d.]+)$", (ROOT / "Makefile").read_text(), re.M)
    assert installed == tested


def make_python(folder: Path) -> Path:
    """The Python of a new environment, which has what ours has except for our own packages."""
    ours, theirs = Path(sysconfig.get_path("purelib")), folder / "packages"
    theirs.mkdir()
    for entry in ours.iterdir():
        if not re.match(r"trident|__editable__|pip\b|setuptools|.*\.pth$", entry.name):
            (theirs / entry.name).symlink_to(entry)
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    (packages,) = (folder / "venv").glob("lib/python3*/site-packages")
    (packages / "image.pth").write_text(f"{theirs}\n")
    return folder / "venv" / "bin" / "python3"


def copy(sources: list[str], target: Path) -> None:
    """What COPY does: of a folder its content, less what .dockerignore names."""
    target.mkdir(parents=True, exist_ok=True)
    ignored = [line.removeprefix("**/") for line in dockerignore() if line.startswith("**/")]
    for source in sources:
        assert f"!{source}" in dockerignore(), f"{source} does not reach the build"
        if (ROOT / source).is_dir():
            shutil.copytree(
                ROOT / source, target, symlinks=True, dirs_exist_ok=True,
                ignore=lambda _, names: [n for n in names if any(fnmatch(n, p) for p in ignored)],
            )  # fmt: skip
        else:
            shutil.copy2(ROOT / source, target)


def stub() -> Path:
    """The program that runs Python models, where it lies in an image and where pytriton has it."""
    root = find_tritonserver(None).resolve().parents[1]
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    name = "triton_python_backend_stub"
    folders = (root / "python_backend_stubs" / version, root / "backends" / "python")
    return next(folder / name for folder in folders if (folder / name).is_file())


def test_all_that_it_does_gives_a_server_that_answers(
    dockerfile: Instructions, tmp_path: Path, default_model: Path, default_embedding_model: Path
) -> None:
    root = tmp_path / "root"

    def placed(text: str) -> str:
        """``text`` with the image's folders under ours."""
        return re.sub(r"(?<![\w/])/(?=(opt|models)\b)", f"{root}/", text)

    python = make_python(tmp_path)
    variables = dict(pair.split("=", 1) for pair in " ".join(all_of(dockerfile, "ENV")).split())
    environment = {name: placed(value) for name, value in variables.items()}
    if os.geteuid() != 0:
        environment["SERVER_USER"] = f"{os.getuid()}:{os.getgid()}"
    for line in all_of(dockerfile, "COPY"):
        *sources, target = line.split()
        copy(sources, Path(placed(target)))
    fetched = Path(environment["TRIDENT_HOME"]) / "models"
    for model in (default_model, default_embedding_model):
        shutil.copytree(model, fetched / model.name, ignore=shutil.ignore_patterns("*.gguf"))
    (command,) = all_of(dockerfile, "RUN")
    done = subprocess.run(
        json.loads(placed(command)), capture_output=True, text=True, check=False,
        env={
            **os.environ, **environment, "PYTHON": str(python), "STUB": str(stub()),
            "PYTHONPATH": "",
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    shutil.rmtree(root / "opt" / "trident" / "source")  # what runs is what was installed
    (packages,) = (tmp_path / "venv").glob("lib/python3*/site-packages")
    assert {"trident_llm", "trident_kernels", "trident_client"} < {
        p.name for p in packages.iterdir()
    }
    assert not (packages / "torch").exists()
    kernels = Path(environment["NUMBA_CACHE_DIR"])
    assert len(list(kernels.rglob("*.nbc"))) >= 5
    owner = environment["SERVER_USER"]
    for path in (kernels, *kernels.rglob("*"), Path(environment["TRIDENT_HOME"])):
        assert f"{path.stat().st_uid}:{path.stat().st_gid}" == owner

    program, repository = json.loads(placed(all_of(dockerfile, "CMD")[0]))
    assert (program, repository) == ("tritonserver", f"--model-repository={root}/models")
    began = {path: path.stat().st_mtime_ns for path in kernels.rglob("*.nb?")}
    with StockServer(tmp_path, root / "models", python=python, environment=environment) as server:
        (result,) = run(server.grpc_port, make_inputs("Hello", {"temperature": 0, "max_tokens": 4}))
        assert strings(result, "text_output")[0].startswith("Hello")
        (result,) = run(server.grpc_port, make_inputs("Hello"), model="embed")
        assert result.as_numpy("embedding").shape == (384,)
        healthy = all_of(dockerfile, "HEALTHCHECK")[0].partition("CMD ")[2]
        asked = json.loads(healthy.replace("localhost:8000", f"localhost:{server.http_port}"))
        assert subprocess.run(asked, env=server.environment, check=False).returncode == 0
        wrong = json.loads(healthy.replace("localhost:8000", f"localhost:{server.http_port}/no"))
        refused = subprocess.run(
            wrong, env=server.environment, stderr=subprocess.DEVNULL, check=False
        )
        assert refused.returncode != 0
    # The kernels were compiled for this server: it compiled none.
    assert {path: path.stat().st_mtime_ns for path in kernels.rglob("*.nb?")} == began
