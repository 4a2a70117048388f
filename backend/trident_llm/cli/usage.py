"""The lines that tell a newcomer how to talk to the server that just came up."""

from __future__ import annotations

import os
import shlex
import sys

from trident_llm.cli.options import EMBEDDING_MODEL_NAME, ServeOptions


def usage_lines(options: ServeOptions) -> list[str]:
    """Lines to copy and paste, for the ports and the model name in use."""
    url = f"localhost:{options.http_port}/v2/models/{options.model_name}"
    prompt = '{"text_input": "The capital of France is", "max_tokens": 16}'
    streamed = '{"text_input": "Once upon a time", "max_tokens": 64, "stream": true}'
    client = f'Client("localhost:{options.grpc_port}", "{options.model_name}")'
    program = (
        f'from trident_client import Client; [print(delta.text, end="", flush=True) for delta in '
        f'{client}.stream("Once upon a time", max_tokens=64)]'
    )
    openai = []
    if options.openai_port is not None:
        chat = '{"messages": [{"role": "user", "content": "Hello"}]}'
        openai = [
            f"  OpenAI's API: http://localhost:{options.openai_port}/v1",
            f"  curl -s localhost:{options.openai_port}/v1/chat/completions "
            f"-H 'Content-Type: application/json' -d '{chat}'",
        ]
        if "--no-page" not in options.openai_args:
            openai.append(f"  in a browser: http://localhost:{options.openai_port}/")
    embed = []
    if options.embedding_model is not None:
        url_of_embed = f"localhost:{options.http_port}/v2/models/{EMBEDDING_MODEL_NAME}"
        embed = [f'  curl -s {url_of_embed}/generate -d \'{{"text_input": "Hello"}}\'']
    return [
        "",
        "Try it:",
        f"  curl -s {url}/generate -d '{prompt}'",
        f"  curl -sN {url}/generate_stream -d '{streamed}'",
        f"  {_python()} -c '{program}'",
        f"  tritonclient: gRPC at localhost:{options.grpc_port}, model {options.model_name}; it is "
        "decoupled, so use start_stream() or stream_infer()",
        *embed,
        *openai,
        f"  metrics: curl -s localhost:{options.metrics_port}/metrics",
        "",
        "Ctrl-C stops the server.",
    ]


def _python() -> str:
    """This interpreter, as short as it can be written from here."""
    relative = os.path.relpath(sys.executable)
    return shlex.quote(sys.executable if relative.startswith("..") else relative)
