"""The decoder against Hugging Face transformers on tiny random checkpoints, in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.model.paged import PagedRun, Sequence
from trident_llm.model.config import ModelConfig, ModelConfigError
from trident_llm.model.decoder import Decoder
from trident_llm.model.rope import inverse_frequencies

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,  # far from uniform predictions, so that errors show
    "bos_token_id": None,
    "eos_token_id": None,
}
FAMILIES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 40,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip

Make = Callable[..., tuple[Any, Path]]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Saves a random model; returns it and its folder. Norms and biases are random as well."""

    def build(family: str, *, shard_size: str = "1GB", **options: Any) -> tuple[Any, Path]:
        config_class, model_class = FAMILIES[family]
        torch.manual_seed(7)
        model = model_class(config_class(**{**SIZES, **options})).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim == 1:
                    parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
        model.save_pretrained(tmp_path, max_shard_size=shard_size)
        return model, tmp_path

    return build


def load(folder: Path, max_len: int = 60) -> Decoder:
    return Decoder.load(
        folder,
        ModelConfig.from_folder(folder),
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_len=max_len,
    )


def prompt(length: int, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, SIZES["vocab_size"], (length,), generator=generator).tolist()


def reference_logits(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return logits


def assert_same_model(model: Any, decoder: Decoder, prompt_length: int = 30) -> None:
    """Logits of a prefill and of decode steps, and greedy ids, of two sequences run together."""
    prompts = [prompt(prompt_length), prompt(7, seed=2)]
    sequences = [Sequence(list(ids)) for ids in prompts]
    run = PagedRun(decoder)
    prefill = run.step(sequences, all_logits=True)
    expected = torch.cat([reference_logits(model, ids) for ids in prompts])
    torch.testing.assert_close(prefill, expected, rtol=1e-4, atol=1e-4)
    for token in (5, 11):
        for sequence in sequences:
            sequence.ids.append(token)
        expected = torch.stack([reference_logits(model, s.ids)[-1] for s in sequences])
        torch.testing.assert_close(run.step(sequences), expected, rtol=1e-4, atol=1e-4)
    for ids, generated in zip(prompts, PagedRun(decoder).greedy(prompts, 8)):
        with torch.no_grad():
            expected = model.generate(
                torch.tensor([ids]), max_new_tokens=8, do_sample=False, pad_token_id=0
            )
        assert generated == expected[0, len(ids) :].tolist()


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True}),
        ("llama", {"mlp_bias": True}),
        ("llama", {"head_dim": 12}),
        ("llama", {"num_key_value_heads": 4}),
        ("llama", {"num_key_value_heads": 1, "rms_norm_eps": 0.1}),
        ("llama", {"hidden_act": "swish", "num_hidden_layers": 1}),
        ("mistral", {"sliding_window": 8}),
        ("mistral", {"sliding_window": None, "head_dim": 16}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 0}),
        ("qwen3", {"head_dim": 16}),
        ("qwen3", {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True}),
        (
            "qwen3",
            {
                "use_sliding_window": True,
                "sliding_window": 5,
                "layer_types": ["sliding_attention", "full_attention"],
            },
        ),
    ],
    ids=str,
)
def test_equals_transformers(make: Make, family: str, options: dict[str, Any]) -> None:
    model, folder = make(family, **options)
    assert_same_model(model, load(folder))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 77.0},
        {"rope_type": "linear", "rope_theta": 100.0, "factor": 3.0},
        LLAMA3_ROPE,
        YARN,
        {**YARN, "beta_fast": 8.0, "beta_slow": 2.0},
        {**YARN, "attention_factor": 0.7},
        {**YARN, "mscale": 0.9, "mscale_all_dim": 0.4},
        {**YARN, "truncate": False},
    ],
    ids=str,
)
def test_rope_equals_transformers(make: Make, rope: dict[str, Any]) -> None:
    # Wide heads: with few dimensions the parts that YaRN and Llama 3 treat apart coincide.
    model, folder = make("llama", rope_parameters=rope, head_dim=32)
    decoder = load(folder)
    torch.testing.assert_close(
        inverse_frequencies(decoder.config.rope), model.model.rotary_emb.inv_freq
    )
    assert_same_model(model, decoder)


@pytest.mark.parametrize("lengths", [(30, 12), (12, 10), (20, 5)])
def test_dynamic_rope_equals_generate_for_each_sequence(
    make: Make, lengths: tuple[int, int]
) -> None:
    # 16 positions originally: sequences start above, cross, or stay below it while together.
    rope = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}
    model, folder = make("llama", rope_parameters=rope, max_position_embeddings=16)
    decoder = load(folder)
    assert decoder.needs_rope_lens
    prompts = [prompt(lengths[0]), prompt(lengths[1], seed=2)]
    for ids, generated in zip(prompts, PagedRun(decoder).greedy(prompts, 10)):
        model.model.rotary_emb.max_seq_len_cached = 16  # it never forgets a longer sequence
        model.model.rotary_emb.inv_freq = model.model.rotary_emb.original_inv_freq
        with torch.no_grad():
            expected = model.generate(
                torch.tensor([ids]), max_new_tokens=10, do_sample=False, pad_token_id=0
            )
        assert generated == expected[0, len(ids) :].tolist()
    logits = PagedRun(decoder).step([Sequence(prompt(40))], all_logits=True)
    torch.testing.assert_close(logits, reference_logits(model, prompt(40)), rtol=1e-4, atol=1e-4)


def test_dynamic_rope_within_the_original_length_needs_no_lengths(make: Make) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}
    model, folder = make("llama", rope_parameters=rope)
    decoder = load(folder, max_len=64)
    assert not decoder.needs_rope_lens
    assert_same_model(model, decoder)


def test_partial_rotary_leaves_the_rest_of_a_head_alone(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    # transformers computes the frequencies for Llama; rotating a part it does for Phi-3.
    from transformers.models.llama import modeling_llama
    from transformers.models.phi3 import modeling_phi3

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", modeling_phi3.apply_rotary_pos_emb)
    rope = {
        "rope_type": "linear",
        "rope_theta": 100.0,
        "factor": 2.0,
        "partial_rotary_factor": 0.5,
    }
    model, folder = make("llama", rope_parameters=rope, head_dim=16)
    decoder = load(folder)
    assert decoder.config.rope.rotary_dim == 8
    assert_same_model(model, decoder)


def test_chunked_prefill_equals_whole_prefill(make: Make) -> None:
    model, folder = make("mistral", sliding_window=8)
    run = PagedRun(load(folder))
    ids = prompt(30)
    sequence, neighbour = Sequence(list(ids)), Sequence(prompt(9, seed=3))
    parts = [
        run.step([sequence], [11], all_logits=True),
        run.step([neighbour, sequence], [9, 1], all_logits=True)[9:],
        run.step([sequence], [18], all_logits=True),
    ]
    torch.testing.assert_close(torch.cat(parts), reference_logits(model, ids), rtol=1e-4, atol=1e-4)


def test_only_the_wanted_rows_get_logits(make: Make) -> None:
    model, folder = make("llama")
    logits = PagedRun(load(folder)).step([Sequence(prompt(9)), Sequence(prompt(4, seed=2))])
    assert logits.shape == (2, SIZES["vocab_size"])
    assert logits.dtype == torch.float32
    torch.testing.assert_close(
        logits[1], reference_logits(model, prompt(4, seed=2))[-1], rtol=1e-4, atol=1e-4
    )


def test_bfloat16_is_as_close_to_float32_as_transformers_is(make: Make) -> None:
    model, folder = make("qwen3", head_dim=16)
    decoder = Decoder.load(
        folder,
        ModelConfig.from_folder(folder),
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        max_len=60,
    )
    assert decoder.dtype == torch.bfloat16
    exact = reference_logits(model, prompt(30))
    theirs = reference_logits(model.to(torch.bfloat16), prompt(30)).float()
    ours = PagedRun(decoder).step([Sequence(prompt(30))], all_logits=True)
    assert (ours - exact).norm() < 1.3 * (theirs - exact).norm()


def test_sharded_checkpoint(make: Make) -> None:
    model, folder = make("qwen2", shard_size="12KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    assert_same_model(model, load(folder))


def test_a_length_beyond_the_positions_is_refused_before_loading(tmp_path: Path) -> None:
    config = ModelConfig.from_dict({**SIZES, "architectures": ["LlamaForCausalLM"]})
    with pytest.raises(ModelConfigError, match=r"max_model_len: 65 is outside 1 to 64"):
        Decoder.load(tmp_path, config, dtype=torch.float32, device=torch.device("cpu"), max_len=65)
