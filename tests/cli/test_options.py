from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import pytest

from trident_llm.cli.errors import CommandError
from trident_llm.cli.main import build_parser
from trident_llm.cli.options import ServeOptions, serve_options
from trident_llm.cli.usage import usage_lines
from trident_llm.core.config import EngineConfig, parse_engine_config, setting_help


def parse(*arguments: str) -> ServeOptions:
    return serve_options(build_parser().parse_args(["serve", *arguments]))


def help_text() -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as ended:
        build_parser().parse_args(["serve", "--help"])
    assert ended.value.code == 0
    return out.getvalue()


def test_every_setting_is_an_option_with_its_help() -> None:
    text = " ".join(help_text().split())
    for name, meaning in setting_help().items():
        assert f"--{name.replace('_', '-')}" in text
        assert " ".join(meaning.split()) in text
    for title in ("model:", "KV cache:", "scheduling:", "other engine settings:", "server:"):
        assert title in text


def test_the_help_tells_defaults() -> None:
    text = " ".join(help_text().split())
    assert "tokens of one KV block (default: 16)" in text
    assert "share the KV of equal prefixes between requests (default: yes)" in text
    assert "(default: SmolLM2-135M-Instruct, fetched once)" in text
    assert "default: None" not in text


def test_every_setting_arrives_with_its_type() -> None:
    hints = get_type_hints(EngineConfig)
    wanted: dict[str, object] = {}
    arguments: list[str] = []
    for field in dataclasses.fields(EngineConfig):
        hint = hints[field.name]
        kind = next((part for part in get_args(hint) if part is not type(None)), hint)
        option = f"--{field.name.replace('_', '-')}"
        literal = next((part for part in (hint, kind) if get_origin(part) is Literal), None)
        if literal is not None:
            wanted[field.name] = get_args(literal)[-1]
            arguments.append(f"{option}={get_args(literal)[-1]}")
        elif kind is bool:
            wanted[field.name] = False
            arguments.append(f"--no-{field.name.replace('_', '-')}")
        else:
            wanted[field.name] = kind(1)
            arguments.append(f"{option}=1")
    options = parse(*arguments)
    assert {"model": options.model, **options.engine_settings} == wanted
    assert all(
        type(options.engine_settings[k]) is type(v) for k, v in wanted.items() if k != "model"
    )


def test_what_is_not_given_is_left_to_the_engine() -> None:
    options = parse("--max-num-seqs", "8", "--enable-prefix-caching")
    assert options.engine_settings == {"max_num_seqs": 8, "enable_prefix_caching": True}
    assert parse_engine_config(options.engine_settings)[0].max_num_seqs == 8
    assert options.model is None
    assert (options.http_port, options.grpc_port, options.metrics_port) == (8000, 8001, 8002)
    assert options.model_name == "llm"
    assert options.self_check


@pytest.mark.parametrize(
    "arguments",
    [
        ["--http-port", "0"],
        ["--http-port", "65536"],
        ["--http-port", "-1"],
        ["--model-name", "a/b"],
        ["--model-name", "../x"],
        ["--dtype", "int3"],
        ["--max-num-seqs", "many"],
        ["--max-num", "3"],  # no abbreviations: a later option may make them ambiguous
    ],
)
def test_a_wrong_command_line_ends_with_status_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(*arguments)
    assert ended.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_ports_must_differ() -> None:
    for arguments in (["--grpc-port", "8000"], ["--openai-port", "8002"]):
        with pytest.raises(CommandError, match="must differ"):
            parse(*arguments)


def test_a_gateway_only_if_asked_for() -> None:
    assert parse().openai_port is None
    options = parse("--openai-port=9000", "--openai-args=--api-key-file 'a b' --workers 2")
    assert options.openai_port == 9000
    assert options.openai_args == ("--api-key-file", "a b", "--workers", "2")
    with pytest.raises(CommandError, match="needs --openai-port"):
        parse("--openai-args=--workers 2")


def test_the_page_is_named_where_there_is_one() -> None:
    def named(*arguments: str) -> bool:
        return any("http://localhost:9000/" in line and "browser" in line
                   for line in usage_lines(parse(*arguments)))  # fmt: skip

    assert named("--openai-port=9000")
    assert not named("--openai-port=9000", "--openai-args=--no-page")
    assert not named()


@pytest.mark.parametrize("option", ["--model=x", "--max-num-seqs=8", "--no-enable-prefix-caching"])
def test_a_given_repository_takes_no_settings(option: str) -> None:
    with pytest.raises(CommandError, match=r"cannot be combined .* 1/model\.json"):
        parse("--model-repository", "models", option)
    assert parse("--model-repository", "models").model_repository == Path("models")


def test_a_command_is_required() -> None:
    with pytest.raises(SystemExit) as ended, contextlib.redirect_stderr(io.StringIO()):
        build_parser().parse_args([])
    assert ended.value.code == 2
    assert isinstance(build_parser(), argparse.ArgumentParser)


def test_a_model_that_embeds() -> None:
    assert parse().models == ("llm",)
    assert parse("--embedding-model=none").models == ("llm",)
    given = parse("--embedding-model=/e", '--embedding-settings={"pooling": "last"}')
    assert (given.embedding_model, given.embedding_settings) == ("/e", {"pooling": "last"})
    assert given.models == ("llm", "embed")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--embedding-model=default", "--model-repository=/r"], "cannot be combined with"),
        (["--embedding-model=default", "--model-name=embed"], "--model-name must not be embed"),
        (['--embedding-settings={"pooling": "cls"}'], "needs --embedding-model"),
    ],
)
def test_contradictions_about_embeddings(arguments: list[str], message: str) -> None:
    with pytest.raises(CommandError, match=message):
        parse(*arguments)


@pytest.mark.parametrize("text", ["3", "[]", "{", "pooling=cls"])
def test_settings_of_the_model_that_embeds_are_an_object(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse("--embedding-model=/e", f"--embedding-settings={text}")
    assert "must be a JSON object" in capsys.readouterr().err
