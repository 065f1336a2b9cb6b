"""Tests of `valkyrie-convert`: logits equal those of transformers, and converting back restores the weights exactly."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import valkyrie
from helpers import mark_slow_except
from valkyrie.checkpoint import Checkpoints
from valkyrie.cli.convert import main
from valkyrie.config.arguments import load_run, parse_run
from valkyrie.config.run import Run
from valkyrie.convert.load import import_folder
from valkyrie.convert.save import export_run
from valkyrie.convert.settings import model_settings, to_config_json
from valkyrie.data.tokenizer_json import train_tokenizer
from valkyrie.parallel.mesh import build_mesh
from valkyrie.processes.ending import EXIT_INTERRUPTED
from valkyrie.processes.locks import write_lock
from valkyrie.train.program import StepProgram
from valkyrie.trees import override_text

GOLDEN = np.load(Path(__file__).parent / "goldens" / "transformers.npz")
CASES = ["llama", "llama3", "mistral", "qwen2", "qwen2_windows", "qwen3", "gpt2"]
CASES += ["mixtral", "olmoe", "qwen3_moe", "qwen3_moe_dense", "gpt_oss", "llama4", "deepseek_v2"]
CASES += ["deepseek_v2_yarn", "deepseek_v2_groups", "deepseek_v3"]
DEFAULT_CASES = ["llama3", "gpt2", "gpt_oss", "deepseek_v3"]
VOCAB = 300
LLAMA4_SLIDING = ["model=llama4_tiny", "model.attention.window_kind=sliding", "model.attention.windows=[null]"]
YARN = ["model=deepseek_tiny", "model.attention.yarn.factor=4", "model.attention.yarn.mscale_all_dim=0"]


def random_weights(shapes: dict[str, list[int]]) -> dict[str, np.ndarray]:
    """Return random weights, the same as in goldens/make_transformers.py."""
    rng = np.random.default_rng(0)
    return {
        name: (rng.standard_normal(shape) * (0.3 if len(shape) < 2 else shape[-1] ** -0.5)).astype(np.float32)
        for name, shape in sorted(shapes.items())
    }


def write_published(folder: Path, case: str, dtype: Any = np.float32, **changes: Any) -> Path:
    """Write a golden case with random weights, as transformers saves a model. `changes` updates config.json."""
    folder.mkdir(parents=True)
    config = json.loads(str(GOLDEN[f"{case}_config"])) | {"dtype": np.dtype(dtype).name} | changes
    (folder / "config.json").write_text(json.dumps(config))
    weights = random_weights(json.loads(str(GOLDEN[f"{case}_shapes"])))
    save_file({name: value.astype(dtype) for name, value in weights.items()}, folder / "model.safetensors")
    return folder


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def restore_parameters(folder: Path, *overrides: str) -> tuple[Run, StepProgram, Any]:
    """Return the run of a converted run folder with these overrides, its program, and its parameters.

    Asserts that the checkpoint has no optimizer state.
    """
    run = load_run(folder, [*overrides, "precision=float32"])
    assert not run.problems(), run.problems()
    program = StepProgram(run, build_mesh(run.config.mesh, jax.devices()))
    checkpoints = Checkpoints(folder, run.config.checkpoint, read_only=True)
    state = checkpoints.restore(program.abstract_state).state
    checkpoints.close()
    assert state.optimizer is None
    return run, program, state.eval_parameters


def convert_folder(folder: Path, runs: Path, *overrides: str) -> Path:
    return import_folder(folder, None, "bytes", [f"runs={runs}", "mesh=1x1x1", *overrides], say=lambda line: None)


@pytest.mark.parametrize("case", mark_slow_except(CASES, DEFAULT_CASES))
def test_logits_equal_those_of_transformers_and_the_round_trip_is_exact(case, tmp_path):
    source = write_published(tmp_path / case, case)
    folder = convert_folder(source, tmp_path / "runs")
    _, program, parameters = restore_parameters(folder)
    expected = GOLDEN[f"{case}_logits"]
    tokens = np.random.default_rng(1).integers(0, VOCAB, (1, expected.shape[1]))
    logits = jax.jit(program.builder.module(parameters).logits)(jnp.asarray(tokens, jnp.int32))
    np.testing.assert_allclose(logits, expected, rtol=2e-5, atol=2e-6)

    exported_folder = export_run(folder, tmp_path / "back", say=lambda line: None)
    tensors_before, tensors_after = read_tensors(source), read_tensors(exported_folder)
    assert tensors_before.keys() == tensors_after.keys()
    for name, value in tensors_before.items():
        np.testing.assert_array_equal(tensors_after[name], value, err_msg=name)
    assert json.loads((exported_folder / "config.json").read_text()) == json.loads((source / "config.json").read_text())


def test_selection_biases_stay_float32_beside_bfloat16_weights(tmp_path):
    source, name = write_published(tmp_path / "model", "deepseek_v3", ml_dtypes.bfloat16), "e_score_correction_bias"
    biases = {key: np.float32(1 / 3) + value for key, value in read_tensors(source).items() if key.endswith(name)}
    change_tensors(source, **{key: value.astype(np.float32) for key, value in biases.items()})
    lines: list[str] = []
    exported = export_run(convert_folder(source, tmp_path / "runs"), tmp_path / "back", file_bytes=1, say=lines.append)
    before, after = read_tensors(source), read_tensors(exported)
    assert biases and {key: value.dtype for key, value in after.items()} == {k: v.dtype for k, v in before.items()}
    assert all(np.array_equal(after[key], before[key]) for key in biases)
    index = json.loads((exported / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in after.values())
    assert "bfloat16 and float32" in lines[0]


def test_experts_of_gpt_oss_in_mxfp4_are_read_and_written_in_bfloat16(tmp_path):
    source = write_published(tmp_path / "model", "gpt_oss", ml_dtypes.bfloat16)
    tensors, rng, expected = read_tensors(source), np.random.default_rng(2), {}
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        digits = rng.integers(0, 16, (experts, outputs, inputs), dtype=np.uint8)
        scales = rng.integers(110, 130, (experts, outputs, inputs // 32), dtype=np.uint8)
        tensors[f"{name}_blocks"] = (digits[..., ::2] | digits[..., 1::2] << 4).reshape(*scales.shape, 16)
        tensors[f"{name}_scales"] = scales
        numbers = values[digits] * np.repeat(2.0 ** (scales.astype(np.float32) - 127), 32, axis=-1)
        expected[name] = numbers.swapaxes(1, 2)
    save_file(tensors, source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    with pytest.raises(ValueError, match=r"gate_up_proj\b"):
        convert_folder(source, tmp_path / "unquantised")
    del config["dtype"]
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (source / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    exported = export_run(convert_folder(source, tmp_path / "runs"), tmp_path / "back", say=lambda line: None)
    after = read_tensors(exported)
    assert {array.dtype for array in after.values()} == {np.dtype(ml_dtypes.bfloat16)}
    for name, numbers in expected.items():
        np.testing.assert_array_equal(after[name].astype(np.float32), numbers)
    assert json.loads((exported / "config.json").read_text()) == config | {"dtype": "bfloat16"}


def test_the_language_model_of_a_llama4_with_a_vision_encoder_is_converted(tmp_path):
    source = write_published(tmp_path / "model", "llama4", ml_dtypes.bfloat16)
    tensors, text_config = read_tensors(source), json.loads((source / "config.json").read_text())
    vision = {"vision_model.norm.weight": np.zeros(3, np.float32)}
    save_file({f"language_model.{n}": value for n, value in tensors.items()} | vision, source / "model.safetensors")
    inner = {key: value for key, value in text_config.items() if key not in ("architectures", "dtype")}
    config = {"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "torch_dtype": "bfloat16"}
    (source / "config.json").write_text(json.dumps(config | {"text_config": inner, "vision_config": {"size": 1}}))
    exported = export_run(convert_folder(source, tmp_path / "runs"), tmp_path / "back", say=lambda line: None)
    after = read_tensors(exported)
    assert after.keys() == tensors.keys()
    assert all(np.array_equal(after[name], value) for name, value in tensors.items())
    assert json.loads((exported / "config.json").read_text()) == text_config | {"torch_dtype": "bfloat16"}


def test_a_setting_that_the_original_config_omits_is_exported(tmp_path):
    source = write_published(tmp_path / "model", "llama")
    config = json.loads((source / "config.json").read_text())
    config = {key: value for key, value in config.items() if not key.startswith("rope_")}
    (source / "config.json").write_text(json.dumps(config))
    for theta in (10000.0, 500000.0):
        folder = convert_folder(source, tmp_path / f"runs_{theta:.0f}", f"model.attention.rope_theta={theta}")
        exported_folder = export_run(folder, tmp_path / f"back_{theta:.0f}", say=lambda line: None)
        exported_config = json.loads((exported_folder / "config.json").read_text())
        assert model_settings(exported_config)["attention.rope_theta"] == theta
        assert (exported_config == config) == (theta == 10000.0)


def test_gpt2_names_without_a_prefix_survive_the_round_trip(tmp_path):
    source = write_published(tmp_path / "model", "gpt2")
    short_named_tensors = {name.removeprefix("transformer."): value for name, value in read_tensors(source).items()}
    save_file(
        short_named_tensors | {"h.0.attn.bias": np.ones((1, 1, 64, 64), np.float32)}, source / "model.safetensors"
    )
    exported_folder = export_run(convert_folder(source, tmp_path / "runs"), tmp_path / "back", say=lambda line: None)
    exported_tensors = read_tensors(exported_folder)
    assert exported_tensors.keys() == short_named_tensors.keys()
    for name, value in short_named_tensors.items():
        np.testing.assert_array_equal(exported_tensors[name], value, err_msg=name)


def test_bfloat16_and_several_files_and_the_tokenizer_survive_the_round_trip(tmp_path):
    source = write_published(tmp_path / "model", "llama", ml_dtypes.bfloat16)
    (source / "tokenizer_config.json").write_text('{"a": 1}')
    folder = convert_folder(source, tmp_path / "runs")
    exported_folder = export_run(folder, tmp_path / "back", file_bytes=20_000, say=lambda line: None)
    index = json.loads((exported_folder / "model.safetensors.index.json").read_text())
    files = sorted({*index["weight_map"].values()})
    assert len(files) > 2 and files == sorted(path.name for path in exported_folder.glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in read_tensors(source).values())
    assert (exported_folder / "tokenizer_config.json").read_text() == '{"a": 1}'
    converted_again = convert_folder(exported_folder, tmp_path / "again")
    float32_folder = export_run(converted_again, tmp_path / "wide", dtype="float32", say=lambda line: None)
    for name, value in read_tensors(source).items():
        assert read_tensors(exported_folder)[name].dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(read_tensors(exported_folder)[name], value, err_msg=name)
        np.testing.assert_array_equal(read_tensors(float32_folder)[name], value.astype(np.float32), err_msg=name)
    assert json.loads((float32_folder / "config.json").read_text())["dtype"] == "float32"


def test_an_unsupported_gpt2_is_refused_by_its_key():
    config = json.loads(str(GOLDEN["gpt2_config"]))
    changes = {"activation_function": "gelu", "scale_attn_by_inverse_layer_idx": True, "n_embd": 30}
    with pytest.raises(ValueError) as error:
        model_settings(config | changes)
    assert all(f" {key}={override_text(value)} is not " in str(error.value) for key, value in changes.items())


@pytest.mark.parametrize("layout", [("mesh=2x2x2", "partition=2d_tp_fsdp"), ("mesh=4x2x1", "partition=fsdp")])
def test_each_device_of_a_mesh_gets_its_shard(layout, tmp_path):
    folder = convert_folder(write_published(tmp_path / "model", "llama"), tmp_path / "runs")
    _, program, parameters = restore_parameters(folder, *layout)
    _, _, full_parameters = restore_parameters(folder)
    for array, expected, spec in zip(
        *map(jax.tree.leaves, (parameters, full_parameters, program.abstract_state.parameters)), strict=True
    ):
        assert array.sharding == spec.sharding
        np.testing.assert_array_equal(array, expected)
    first_array = jax.tree.leaves(parameters)[0]
    assert first_array.addressable_shards[0].data.size < first_array.size


@pytest.mark.slow
def test_a_converted_run_trains_on_another_mesh_and_is_exported(tmp_path):
    folder = convert_folder(write_published(tmp_path / "model", "llama"), tmp_path / "runs")
    arguments = ["resume=model", "mesh=1x2x2", "partition=2d_tp", "data=synthetic", "data.documents=50", "steps=3"]
    arguments += ["batch=8", "seq=32", "sample_tokens=4", "tracking=off", "optimizer.ema_decay=0.9"]
    command = [sys.executable, "-m", "valkyrie.cli.train", *arguments]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "from step 0" in result.stdout and "so far" not in result.stdout
    exported_folder = export_run(folder, tmp_path / "back", say=lambda line: None)
    tensors_before, tensors_after = read_tensors(tmp_path / "model"), read_tensors(exported_folder)
    assert tensors_before.keys() == tensors_after.keys()
    assert all(value.shape == tensors_after[name].shape for name, value in tensors_before.items())
    assert not np.array_equal(tensors_before["lm_head.weight"], tensors_after["lm_head.weight"])
    for mode in ("eval", "generate"):
        command = [sys.executable, "-m", "valkyrie.cli.train", "resume=model", f"mode={mode}"]
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stdout + result.stderr


def change_tensors(folder: Path, **changes: np.ndarray | None) -> None:
    tensors = {**read_tensors(folder), **changes}
    save_file({name: value for name, value in tensors.items() if value is not None}, folder / "model.safetensors")


def refusal_message(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as error:
        main([*arguments])
    assert error.value.code == 2
    return capsys.readouterr().err.strip().removeprefix("valkyrie-convert: ")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "config.json: architectures=['MambaForCausalLM'] "),
        ({"hidden_act": "relu6"}, "config.json: hidden_act=relu6 "),
        ({"mlp_bias": True}, "config.json: mlp_bias=true "),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "config.json: rope_parameters.rope_type=yarn "),
        (
            {"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": {"type": "linear", "factor": 4}},
            "config.json: rope_scaling and rope_parameters ",
        ),
        (
            {"rope_theta": 500000, "rope_parameters": {"rope_theta": 10000}},
            "config.json: rope_theta=500000 and rope_parameters.rope_theta=10000 ",
        ),
        ({"model_type": "gpt2"}, "config.json: model_type=gpt2 contradicts architectures=['LlamaForCausalLM'], "),
        ({"partial_rotary_factor": 0.5}, "config.json: partial_rotary_factor=0.5 "),
        ({"quantization_config": {"bits": 4}}, "config.json: quantization_config: "),
        ({"hidden_size": None}, "config.json: hidden_size=None, "),
        ({"num_attention_heads": 0}, "config.json: num_attention_heads=0, "),
        ({"hidden_act": ["silu"]}, "config.json: expected `str | null`, got `array` at $.hidden_act"),
        ({"rms_norm_eps": "small"}, "config.json: expected `float`, got `str` at $.rms_norm_eps"),
        ({"vocab_size": 200}, "tokenizer=bytes has 257 ids, "),
        ({"num_attention_heads": 3}, "model.attention.heads=3 "),
    ],
)
def test_unsupported_settings_are_refused_by_their_key(changes, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = write_published(tmp_path / "model", "llama", **changes)
    if "vocab_size" in changes:
        tables = {name: value[:200] for name, value in read_tensors(folder).items() if value.shape[0] == VOCAB}
        change_tensors(folder, **tables)
    assert refusal_message(capsys, "from-hf", "model", "--tokenizer", "bytes").startswith(message)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model=gpt_tiny", "model=gpt_tiny: the architecture comes from config.json. "),
        ("model.embed=64", "model.embed=64: the architecture comes from config.json. "),
        ("mode=eval", "mode=eval: from-hf only writes a new run. "),
        ("resume=x", "resume=x: from-hf only writes a new run. "),
        ("mesh=3x1x1", "2 problems"),
        ("name=y", "name=y: --name model already names the run. "),
    ],
)
def test_overrides_that_cannot_apply_are_refused(override, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_published(tmp_path / "model", "llama")
    text = refusal_message(capsys, "from-hf", "model", "--name", "model", "--tokenizer", "bytes", override)
    assert text.startswith(message) and "model.embed=33" not in text
    assert not (tmp_path / "runs").exists()


def test_a_seq_beyond_the_positions_of_the_weights_is_noted_or_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("valkyrie.convert.load._save_checkpoint", lambda *_: None)
    lines: list[str] = []

    def convert(case: str, name: str, *overrides: str) -> None:
        folder = tmp_path / case
        if not folder.exists():
            write_published(folder, case)
        import_folder(folder, name, "bytes", [f"runs={tmp_path}", "mesh=1x1x1", *overrides], say=lines.append)

    convert("llama", "a", "seq=4096")
    assert [line.startswith("note: seq=4096: ") for line in lines] == [True, False]
    assert "seq=64" in lines[0] and "model.context=4096" in lines[0]
    lines.clear()
    convert("llama", "b", "seq=4096", "model.context=4096")
    convert("llama", "c", "seq=64")
    assert not any("note: " in line for line in lines)
    with pytest.raises(ValueError, match=r"^seq=4096: model=gpt2 .*\bseq=64\b"):
        convert("gpt2", "d", "seq=4096")
    with pytest.raises(ValueError, match=r"^model\.context=4096: .*config\.json\b"):
        convert("gpt2", "d", "seq=4096", "model.context=4096")


def test_a_default_mesh_that_does_not_suit_the_model_is_no_reason_to_refuse(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TPU_MESH_CONFIG", "1,1,3")
    load_arguments = ("from-hf", str(write_published(tmp_path / "model", "llama")), "--tokenizer", "bytes")
    assert "batch=7 is not divisible by 3" in refusal_message(capsys, *load_arguments, "batch=7")
    assert "steps=-1" in refusal_message(capsys, *load_arguments, "steps=-1")
    main([*load_arguments])
    assert (tmp_path / "runs" / "model").exists()


def test_an_incomplete_folder_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    load = ("from-hf", "model", "--tokenizer", "bytes")
    assert refusal_message(capsys, *load).startswith("model is not a folder. ")
    folder = write_published(tmp_path / "model", "llama")
    name = "model.layers.1.self_attn.q_proj.weight"
    message = refusal_message(capsys, "from-hf", "model")
    assert "--tokenizer" in message and "tokenizer.json" in message
    write_published(tmp_path / "of_bytes", "llama", vocab_size=257)
    assert "a name such as bytes, " in refusal_message(capsys, "from-hf", "of_bytes")
    other_tensors = [tensor for tensor in read_tensors(folder) if tensor != name]
    for tensor, details in (
        (None, ["model has no tensor "]),
        (np.zeros((32, 16), np.float32), ["shapes that do not match", "[32, 16]", "[32, 32]"]),
        (np.zeros((32, 32), np.int8), ["tensors that are not ", "F32", "BF16", "F16", "I8"]),
    ):
        change_tensors(folder, **{name: tensor})
        message = refusal_message(capsys, *load)
        assert all(part in message for part in (name, *details))
        assert not any(other in message for other in other_tensors)
    change_tensors(
        folder, **{name: np.zeros((32, 32), np.float32), "model.layers.0.self_attn.q_proj.bias": np.zeros(32)}
    )
    message = refusal_message(capsys, *load)
    assert "model.layers.0.self_attn.q_proj.bias" in message and name not in message
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:1000])
    message = refusal_message(capsys, *load)
    assert message.startswith("model/model.safetensors ") and "complete safetensors file" in message
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    message = refusal_message(capsys, *load)
    assert "model has no model.safetensors " in message and "(pytorch_model.bin)" in message
    for damaged in ([1, 2], {"a": 5}):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": damaged}))
        message = refusal_message(capsys, *load)
        assert message.startswith("model/model.safetensors.index.json ") and "weight_map" in message
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    message = refusal_message(capsys, *load)
    assert "model-00001-of-00002.safetensors" in message and "delete" not in message
    (folder / "model.safetensors").touch()
    assert "delete model.safetensors.index.json" in refusal_message(capsys, *load)
    for outside in ("../a.safetensors", "/a.safetensors"):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": outside}}))
        assert f"lists {outside}, outside of the folder" in refusal_message(capsys, *load)
    (folder / "config.json").unlink()
    message = refusal_message(capsys, *load)
    assert message.startswith("model has no config.json") and ".safetensors" not in message


def test_weights_that_are_not_finite_are_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    change_tensors(
        write_published(tmp_path / "model", "llama"), **{"model.norm.weight": np.full(32, np.nan, np.float32)}
    )
    message = refusal_message(capsys, "from-hf", "model", "--tokenizer", "bytes")
    assert message.startswith("model/model.safetensors") and "model.norm.weight" in message
    assert re.findall(r"\b\d+\b", message) == ["32", "32"]
    assert not (tmp_path / "runs" / "model").exists()


def test_git_lfs_pointers_are_named(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = write_published(tmp_path / "model", "llama")
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    load = ("from-hf", "model", "--tokenizer", "bytes")
    (folder / "tokenizer.json").write_text(pointer)
    messages = [refusal_message(capsys, "from-hf", "model")]
    (folder / "model.safetensors").write_text(pointer)
    messages.append(refusal_message(capsys, *load))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    messages.append(refusal_message(capsys, *load))
    for message, file in zip(messages, ("tokenizer.json", "model.safetensors", "pytorch_model.bin"), strict=True):
        assert message.startswith(f"model/{file} ") and "`git lfs pull`" in message


def test_tied_embeddings_that_differ_are_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = write_published(tmp_path / "model", "llama", tie_word_embeddings=True)
    message = refusal_message(capsys, "from-hf", "model", "--tokenizer", "bytes")
    assert message.startswith("model: lm_head.weight ") and "model.embed_tokens.weight" in message
    assert "tie_word_embeddings" in message and not (tmp_path / "runs").exists()
    change_tensors(folder, **{"lm_head.weight": read_tensors(folder)["model.embed_tokens.weight"]})
    main(["from-hf", "model", "--tokenizer", "bytes", "mesh=1x1x1"])


def test_the_help_of_from_hf_shows_settings(capsys):
    with pytest.raises(SystemExit):
        main(["from-hf", "--help"])
    assert "FOLDER [KEY=VALUE ...]" in capsys.readouterr().out


def test_a_number_beyond_the_range_of_the_dtype_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    norm = np.full(32, 1e6, np.float32)
    norm[1:] = 65504
    change_tensors(write_published(tmp_path / "model", "llama"), **{"model.norm.weight": norm})
    main(["from-hf", "model", "--tokenizer", "bytes", "mesh=1x1x1"])
    capsys.readouterr()
    save_arguments = ("to-hf", "model", "out", "--dtype", "float16", "--file-gb", "1e-5")
    message = refusal_message(capsys, *save_arguments)
    assert message.startswith("model.norm.weight has 1 number ") and "--dtype bfloat16" in message
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir(mode=0o750)
    before = (tmp_path / "out").stat()
    assert refusal_message(capsys, *save_arguments) == message and not [*(tmp_path / "out").iterdir()]
    after = (tmp_path / "out").stat()
    assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode), "the user's folder is kept"
    main(["to-hf", "model", "out", "--dtype", "bfloat16"])


def test_a_damaged_checkpoint_is_not_exported(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main(["from-hf", str(write_published(tmp_path / "model", "llama")), "--tokenizer", "bytes", "mesh=1x1x1"])
    root = tmp_path / "runs" / "model" / "checkpoints"
    (root / "6").mkdir()
    capsys.readouterr()
    main(["to-hf", "model", "out"])
    err = capsys.readouterr().err
    assert "step 6 in runs/model/checkpoints " in err and "damaged" in err and "step 0 instead" in err
    message = refusal_message(capsys, "to-hf", "model", "b", "--step", "6")
    assert "step 6 in runs/model/checkpoints " in message and "another --step" in message
    (root / "0" / "about" / "metadata").unlink()
    message = refusal_message(capsys, "to-hf", "model", "b")
    assert "metadata" in message and "no other checkpoint" in message
    run_file = tmp_path / "runs" / "model" / "run.yaml"
    run_file.write_text(re.sub("rope_theta: .*", "rope_theta: null", run_file.read_text()))
    assert "rope_theta=null" in refusal_message(capsys, "to-hf", "model", "b"), (
        "the model is checked before the checkpoint"
    )


def test_paths_with_spaces_are_converted_and_unwritable_ones_are_named(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = write_published(tmp_path / "My {Models}, [2024]" / "modèle's (3)", "llama")
    train_tokenizer(["some text"], 257, "cl100k", source / "tokenizer.json")
    main(["from-hf", str(source), "mesh=1x1x1"])
    assert "modèle-s-3" in capsys.readouterr().out
    (run_folder,) = (tmp_path / "runs").iterdir()
    assert load_run(run_folder, []).tokenizer == str(run_folder / "huggingface" / "tokenizer.json")
    (tmp_path / "file").touch()
    message = refusal_message(capsys, "to-hf", run_folder.name, "file/out")
    assert "file/out" in message and "another FOLDER" in message


def test_to_hf_writes_the_tokenizer_of_the_run_or_reports_that_it_has_no_file(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = write_published(tmp_path / "model", "llama")
    (source / "tokenizer_config.json").write_text("{}")
    train_tokenizer(["some text"], 257, "cl100k", tmp_path / "own.json")
    for name, tokenizer in (("a", "bytes"), ("b", "own.json")):
        main(["from-hf", "model", "--tokenizer", tokenizer, "--name", name, "mesh=1x1x1"])
        main(["to-hf", name, f"{name}_hf"])
    assert capsys.readouterr().out.count("tokenizer=bytes has no tokenizer.json") == 1
    assert not (tmp_path / "a_hf" / "tokenizer.json").exists()
    assert (tmp_path / "b_hf" / "tokenizer.json").read_bytes() == (tmp_path / "own.json").read_bytes()


def test_existing_files_are_not_overwritten(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_published(tmp_path / "model", "llama")
    main(["from-hf", "model", "--tokenizer", "bytes", "mesh=1x1x1"])
    next_commands = re.findall("valkyrie-train (.+)", capsys.readouterr().out)
    assert ["resume=model", "mode=generate"] in [command.split()[:2] for command in next_commands]
    load = ("from-hf", "model", "--tokenizer", "bytes")
    write_times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert "runs/model already exists" in refusal_message(capsys, *load)
    assert refusal_message(capsys, "to-hf", "model", "model").startswith("model is not an empty folder. ")
    assert write_times == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with write_lock(tmp_path / "c"):
        assert re.match(r"c .*process \d+ .*\banother FOLDER\b", refusal_message(capsys, "to-hf", "model", "c"))
    main(["to-hf", "model", "c"])
    out = capsys.readouterr().out
    assert "tokenizer=bytes " in out and "no tokenizer.json" in out
    assert {path.name for path in (tmp_path / "c").iterdir()} == {"config.json", "model.safetensors"}
    assert refusal_message(capsys, "to-hf", "model", "b", "--step", "7").startswith("--step 7: ")
    assert refusal_message(capsys, "to-hf", "other", "b").startswith("other: ")
    assert refusal_message(capsys, "to-hf", "model", "b", "steps=3").startswith("steps=3: ")
    assert "--shards is neither " in refusal_message(capsys, *load, "--shards", "3")
    message = refusal_message(capsys, *load, "stps=3", "--name", "b")
    assert "stps" in message and re.search(r"\bsteps\b", message)


def test_a_folder_in_conversion_is_in_use_and_ctrl_c_deletes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_published(tmp_path / "model", "llama")
    monkeypatch.chdir(tmp_path)
    load = ("from-hf", "model", "--tokenizer", "bytes", "mesh=1x1x1")
    messages: list[str] = []

    def convert_again(*_: object) -> None:
        messages.append(refusal_message(capsys, *load))
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("valkyrie.convert.load._save_checkpoint", convert_again)
    with pytest.raises(SystemExit, match=str(EXIT_INTERRUPTED)):
        main([*load])
    (message,) = messages
    assert re.match(r"runs/model/huggingface .*process \d+ .*\banother name=", message)
    assert not (tmp_path / "runs" / "model").exists()
    assert capsys.readouterr().err == "valkyrie-convert: stopped\n"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["model=valkyrie_tiny"], "model.family=valkyrie cannot be converted"),
        (["model=gpt2_tiny", "model.attention.windows=[8]"], "model.attention.windows=[8]"),
        (["model=gpt_tiny", "model.embedding_scale=2"], "model.embedding_scale=2.0"),
        (["model=gpt_tiny", "model.residual=parallel"], "model.residual=parallel"),
        (["model=gpt_tiny", "model.attention.soft_cap=50"], "model.attention.soft_cap=50.0"),
        (["model=gpt_tiny", "model.feed_forward=relu2"], "model.feed_forward=relu2"),
        (["model=mixtral_8x7b", "model.dense_layers=1"], "model.dense_layers=1"),
        (["model=olmoe_1b_7b", "model.dense_layers=1"], "model.dense_layers=1"),
        (["model=deepseek_tiny", "model.moe.biases=true"], "model.moe.biases=true"),
        (["model=deepseek_tiny", "model.moe.shared_experts=0"], "model.moe.shared_experts=0"),
        (["model=gpt_oss_tiny", "model.moe.biases=false"], "model.moe.biases=false"),
        (["model=llama4_tiny", "model.moe.shared_experts=2"], "model.moe.shared_experts=2"),
        (["model=llama4_tiny", "model.attention.window_kind=sliding"], "model.attention.window_kind=sliding"),
        ([*LLAMA4_SLIDING, "model.attention.dilations=[2]"], "model.attention.dilations=[2]"),
        ([*LLAMA4_SLIDING, "model.attention.global_tokens=2"], "model.attention.global_tokens=2"),
        (["model=llama4_tiny", "model.attention.windows=[8,16]"], "model.attention.windows=[8, 16]"),
        (["model=llama4_tiny", "model.attention.qk_norm_scale=true"], "model.attention.qk_norm_scale=true"),
        (["model=llama_7b", "model.attention.rope_layers=[true,false]"], "model.attention.rope_layers="),
        (["model=gpt_oss_tiny", "model.attention.yarn.mscale_all_dim=1"], "yarn.mscale_all_dim=1"),
        (["model=moe_tiny", "model.moe.normalize=true", "model.attention.yarn.factor=2"], "attention.yarn.factor=2"),
        ([*YARN, "model.attention.yarn.mscale=0.7"], "model.attention.yarn.mscale=0.7"),
        ([*YARN, "model.attention.yarn.mscale=0"], "model.attention.yarn.mscale=0"),
        ([*YARN[:2], "model.attention.yarn.mscale=0"], "model.attention.yarn.mscale=0"),
    ],
)
def test_the_refusal_to_export_an_unsupported_model_names_its_key(settings, message):
    with pytest.raises(ValueError) as error:
        to_config_json(parse_run([*settings, "mesh=1x1x1"]).model)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "settings",
    [
        ["model=llama_7b"],
        ["model=gpt_1b", "model.attention.windows=[64]"],
        [
            "model=gpt_1b",
            "model.attention.qk_norm=true",
            "model.norm_epsilon=1e-6",
            "model.attention.windows=[64,null]",
        ],
    ],
)
def test_an_exported_model_is_rebuilt_from_its_config(settings):
    model = parse_run([*settings, "mesh=1x1x1"]).model
    model_fields = model_settings(to_config_json(model))
    rebuilt_model = parse_run(
        ["model=gpt_schema", "mesh=1x1x1", *(f"model.{k}={v}".replace("None", "null") for k, v in model_fields.items())]
    ).model
    own_fields = ("name", "tokenizer", "vocab_multiple", "loss_chunk")
    differing_fields = {k for k in vars(model) if getattr(model, k) != getattr(rebuilt_model, k)} - {
        *own_fields,
        "attention",
    }
    assert not differing_fields
    windows = [
        [m.attention.windows[i % len(m.attention.windows)] for i in range(m.layers)] for m in (model, rebuilt_model)
    ]
    assert windows[0] == windows[1]
    model.attention.windows = rebuilt_model.attention.windows
    assert model.attention == rebuilt_model.attention


@pytest.mark.parametrize(
    "overrides",
    [
        ["model=deepseek_v2_lite"],
        ["model=deepseek_v3"],
        ["model=gpt_oss_20b"],
        ["model=llama4_scout"],
        ["model=llama4_tiny", "model.feed_forward_pattern=[feed_forward,moe]", "model.attention.temperature_slope=0"],
        ["model=gpt_oss_120b", "model.attention.bias=none", "model.attention.windows=[null]"],
        ["model=deepseek_tiny", "model.attention.yarn.factor=1", "model.moe.shared_experts=2"],
        YARN,
    ],
)
def test_an_exported_mixture_is_rebuilt_from_its_config(overrides):
    config = parse_run([*overrides, "mesh=1x1x1"]).model
    settings = {k: "null" if v is None else override_text(v) for k, v in model_settings(to_config_json(config)).items()}
    del settings["name"]
    rebuilt = parse_run(
        [f"model={config.family}_schema", "mesh=1x1x1", *(f"model.{k}={v}" for k, v in settings.items())]
    ).model
    assert rebuilt.attention == config.attention
    assert rebuilt.feed_forward_kinds == config.feed_forward_kinds
    trained_only = {"balance_weight": 0, "z_weight": 0, "balance_over": None, "group_score": None}
    assert vars(rebuilt.moe) | trained_only == vars(config.moe) | trained_only


@pytest.mark.parametrize(
    ("case", "changes", "key"),
    [
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method"),
        ("deepseek_v2", {"num_key_value_heads": 2}, "num_key_value_heads"),
        ("deepseek_v2_yarn", {"rope_parameters": {"rope_type": "yarn", "factor": 8.0}}, "rope_parameters"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave"),
        ("gpt_oss", {"swiglu_limit": 6.0}, "swiglu_limit"),
        ("llama4", {"num_experts_per_tok": 2}, "num_experts_per_tok"),
        ("llama4", {"no_rope_layers": [], "no_rope_layer_interval": 0}, "no_rope_layer_interval"),
        ("llama4", {"no_rope_layers": None, "no_rope_layer_interval": None}, "no_rope_layer_interval"),
        ("llama4", {"moe_layers": None, "interleave_moe_layer_step": 0}, "interleave_moe_layer_step"),
        ("llama4", {"floor_scale": 0.5}, "floor_scale"),
        ("llama4", {"layer_types": ["full_attention"]}, "layer_types"),
        ("llama4", {"layer_types": ["sliding_attention"] * 8}, "layer_types"),
        ("gpt_oss", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ("mixtral", {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func"),
    ],
)
def test_unsupported_settings_of_mixtures_are_refused_by_their_key(case, changes, key):
    with pytest.raises(ValueError, match=f"^config.json: {key}\\b"):
        model_settings(json.loads(str(GOLDEN[f"{case}_config"])) | changes)


def test_keys_that_a_deepseek_v3_omits_have_the_defaults_of_transformers():
    defaults = {"attention.query_latent": 1536, "dense_layers": 3, "moe.groups": 8, "moe.top_groups": 4}
    defaults |= {"moe.normalize": True, "moe.routed_scaling": 2.5}
    keys = ("q_lora_rank", "first_k_dense_replace", "n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor")
    config = json.loads(str(GOLDEN["deepseek_v3_config"]))
    settings = model_settings({key: value for key, value in config.items() if key not in keys})
    assert {key: settings[key] for key in defaults} == defaults


def test_keys_that_a_gpt_oss_omits_have_the_defaults_of_transformers():
    model = parse_run(["model=gpt_oss_20b", "mesh=1x1x1"]).model
    config, keys = to_config_json(model), ("layer_types", "sliding_window", "rope_scaling", "rope_parameters")
    keys += ("rope_theta", "attention_bias", "head_dim", "num_key_value_heads")
    settings = model_settings({key: value for key, value in config.items() if key not in keys})
    assert settings == model_settings(config)


def test_keys_that_a_llama4_omits_have_the_defaults_of_transformers():
    config, keys = json.loads(str(GOLDEN["llama4_config"])), ("layer_types", "no_rope_layers", "moe_layers")
    keys += ("use_qk_norm", "attn_temperature_tuning", "attn_scale")
    assert model_settings({key: value for key, value in config.items() if key not in keys}) == model_settings(config)


def test_the_temperature_of_a_llama4_is_converted_to_settings_that_are_legal():
    config = json.loads(str(GOLDEN["llama4_config"]))
    settings = model_settings(config | {"floor_scale": float(config["floor_scale"])})
    assert settings == model_settings(config) and type(settings["attention.temperature_interval"]) is int
    assert settings["attention.temperature_slope"] > 0
    only_rotated = model_settings(config | {"no_rope_layers": [1] * config["num_hidden_layers"]})
    assert only_rotated["attention.temperature_slope"] == 0


def test_modules_for_further_tokens_are_left_out(tmp_path):
    source = write_published(tmp_path / "model", "deepseek_v3")
    change_tensors(source, **{"model.layers.3.eh_proj.weight": np.zeros((32, 64), np.float32)})
    assert convert_folder(source, tmp_path / "runs").is_dir()
    change_tensors(source, **{"model.layers.4.eh_proj.weight": np.zeros((32, 64), np.float32)})
    with pytest.raises(ValueError, match=r"model\.layers\.4\."):
        convert_folder(source, tmp_path / "again")


@pytest.mark.slow
def test_python_converts_both_ways_and_names_its_own_arguments(tmp_path, capsys):
    source = write_published(tmp_path / "llama", "llama")
    folder = valkyrie.from_hf(source, f"runs={tmp_path / 'runs'}", tokenizer="bytes", quiet=True)
    assert capsys.readouterr().out == "" and folder == tmp_path / "runs" / "llama"
    model, expected = (
        valkyrie.load_model(folder, "mesh=2x2x2", "partition=sp", "precision=float32"),
        GOLDEN["llama_logits"],
    )
    tokens = np.random.default_rng(1).integers(0, VOCAB, (1, expected.shape[1]))
    np.testing.assert_allclose(model(tokens), expected, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(model(tokens[:, :7]), expected[:, :7], rtol=2e-5, atol=2e-6)
    with pytest.raises(ValueError, match=r"llama already exists.* name=NAME\b"):
        valkyrie.from_hf(source, f"runs={tmp_path / 'runs'}", tokenizer="bytes", quiet=True)
    with pytest.raises(ValueError, match=r"^step=3: .* has no such checkpoint"):
        valkyrie.to_hf(folder, tmp_path / "back", step=3, quiet=True)
    with pytest.raises(ValueError, match=r"^dtype=int8: must be float32"):
        valkyrie.to_hf(folder, tmp_path / "back", dtype="int8")
