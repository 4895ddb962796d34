"""Quantised checkpoints against plain ones, made by packing known integers with loops of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve.errors import WeightsError
from jaxserve.weights.model_files import open_model
from jaxserve.weights.quantised import SUPPORTED, dequantised
from jaxserve.weights.safetensors import SafetensorsSource
from tests.models.tiny import LLAMA, hf_tensors, write_hf

O, I, GROUP = 24, 64, 16  # noqa: E741
Packed = tuple[dict[str, Any], dict[str, np.ndarray], np.ndarray]  # quantization_config, tensors, the weight
F16 = np.float16


def rng() -> np.random.Generator:
    return np.random.default_rng(4)


def packed(values: np.ndarray, bits: int, order: list[int] | None = None) -> np.ndarray:
    """Integers [M, N] side by side along N, `order` says which of a word's columns is in each place."""
    each = 32 // bits
    order = order or list(range(each))
    out = np.zeros((values.shape[0], -(-values.shape[1] // each)), np.uint32)
    for m in range(values.shape[0]):
        for n in range(values.shape[1]):
            out[m, n // each] |= np.uint32(int(values[m, n]) << (bits * order.index(n % each)))
    return out.view(np.int32)


def awq() -> Packed:
    q, z = rng().integers(16, size=(I, O)), rng().integers(16, size=(I // GROUP, O))
    scales = rng().uniform(0.5, 2, (I // GROUP, O)).astype(F16)
    weight = np.stack([(q[i] - z[i // GROUP]) * scales[i // GROUP].astype(float) for i in range(I)])
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    tensors = {"x.qweight": packed(q, 4, order), "x.qzeros": packed(z, 4, order), "x.scales": scales}
    return {"quant_method": "awq", "bits": 4, "version": "gemm", "group_size": GROUP}, tensors, weight.T


def gptq(bits: int, format: str | None, in_order: bool) -> Packed:
    q, z = rng().integers(2**bits, size=(I, O)), rng().integers(1, 2**bits, size=(I // GROUP, O))
    scales = rng().uniform(0.5, 2, (I // GROUP, O)).astype(F16)
    g_idx = np.arange(I) // GROUP if in_order else rng().permutation(np.arange(I) // GROUP)
    weight = np.stack([(q[i] - z[g_idx[i]]) * scales[g_idx[i]].astype(float) for i in range(I)])
    tensors = {
        "x.qweight": np.ascontiguousarray(packed(q.T, bits).T),
        "x.qzeros": packed(z - (format != "gptq_v2"), bits), "x.scales": scales,
    }  # fmt: skip
    if not in_order:
        tensors["x.g_idx"] = g_idx.astype(np.int32)
    config = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": not in_order}
    return config | ({} if format is None else {"checkpoint_format": format}), tensors, weight.T


def float8(scale_shape: tuple[int, ...], block: list[int] | None, ending: str = "_scale_inv") -> Packed:
    stored = (rng().standard_normal((O, I)) * 50).astype(ml_dtypes.float8_e4m3fn)
    scale = rng().uniform(0.5, 2, scale_shape).astype(np.float32)
    weight = np.zeros((O, I))
    for o in range(O):
        for i in range(I):
            if block is not None:
                factor = scale[o // block[0], i // block[1]]
            else:
                factor = scale.flat[o if scale.size > 1 else 0]
            weight[o, i] = float(stored[o, i]) * factor
    config = {"quant_method": "fp8", "weight_block_size": block, "activation_scheme": "dynamic"}
    return config, {"x.weight": stored, "x.weight" + ending: scale}, weight


def compressed(
    format: str, group: int, zero_point: bool = False, ordered: bool = True, bits: int = 4
) -> Packed:
    groups = I // group
    scale = rng().uniform(0.5, 2, (O, groups)).astype(ml_dtypes.bfloat16)
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1)
    q = rng().integers(low, high, size=(O, I))
    z = rng().integers(low, high, size=(O, groups)) * zero_point
    g_idx = np.arange(I) // group if ordered else rng().permutation(np.arange(I) // group)
    columns = [(q[:, i] - z[:, g_idx[i]]) * scale[:, g_idx[i]].astype(float) for i in range(I)]
    weight = np.stack(columns, axis=1)
    config = {
        "quant_method": "compressed-tensors", "format": format,
        "config_groups": {"group_0": {"weights": {"num_bits": bits, "group_size": group}}},
    }  # fmt: skip
    tensors: dict[str, np.ndarray] = {"x.weight_scale": scale}
    if format == "pack-quantized":
        tensors |= {"x.weight_packed": packed(q - low, bits), "x.weight_shape": np.array([O, I])}
        if zero_point:
            tensors["x.weight_zero_point"] = np.ascontiguousarray(packed((z - low).T, bits).T)
        if not ordered:
            tensors["x.weight_g_idx"] = g_idx.astype(np.int32)
    else:
        tensors["x.weight"] = q.astype(np.int8)
        if zero_point:
            tensors["x.weight_zero_point"] = z.astype(np.int8)
    return config, tensors, weight


def compressed_float8(scale_shape: tuple[int, ...]) -> Packed:
    _, tensors, weight = float8(scale_shape, None, "_scale")
    return {"quant_method": "compressed-tensors", "format": "float-quantized"}, tensors, weight


FORMS: dict[str, Callable[[], Packed]] = {
    "awq": awq,
    "gptq 4": lambda: gptq(4, None, True),
    "gptq 4 by activations": lambda: gptq(4, "gptq", False),
    "gptq 8": lambda: gptq(8, "gptq", True),
    "gptq 2": lambda: gptq(2, "gptq", True),
    "gptq v2": lambda: gptq(4, "gptq_v2", True),
    "fp8 blocks": lambda: float8((2, 3), [16, 24], "_scale_inv"),
    "fp8 tensor": lambda: float8((), None, "_scale_inv"),
    "fp8 tensor of 1": lambda: float8((1,), None, "_scale"),
    "fp8 rows": lambda: compressed_float8((O, 1)),
    "compressed fp8 tensor": lambda: compressed_float8((1,)),
    "compressed int8": lambda: compressed("int-quantized", I, bits=8),
    "compressed int8 zeros": lambda: compressed("naive-quantized", GROUP, zero_point=True, bits=8),
    "compressed int4": lambda: compressed("pack-quantized", GROUP),
    "compressed int4 by rows": lambda: compressed("pack-quantized", I),
    "compressed int4 zeros": lambda: compressed("pack-quantized", GROUP, zero_point=True),
    "compressed int4 by activations": lambda: compressed("pack-quantized", GROUP, ordered=False),
    "compressed packed int8": lambda: compressed("pack-quantized", GROUP, bits=8),
}


def opened(folder: Path, config: dict[str, Any] | None, tensors: dict[str, np.ndarray]) -> SafetensorsSource:
    described = {} if config is None else {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(described))
    save_file(tensors, folder / "model.safetensors")
    return SafetensorsSource(folder)


@pytest.mark.parametrize("name", FORMS)
def test_a_quantised_matrix_has_the_values_that_were_packed(name, tmp_path):
    config, tensors, weight = FORMS[name]()
    plain = np.float32([1, 2, 3])
    source = dequantised(opened(tmp_path, config, {**tensors, "x.input_scale": plain[:1], "norm": plain}))
    assert set(source.tensors) == {"x.weight", "norm"}
    assert source.tensors["x.weight"].shape == weight.shape
    assert source.read("x.weight").dtype == np.float32
    np.testing.assert_allclose(source.read("x.weight"), weight, rtol=1e-6)
    for start, stop in ((0, 5), (5, 16), (16, 17), (17, 24)):  # in and out of step with words and blocks
        np.testing.assert_allclose(source.read_rows("x.weight", start, stop), weight[start:stop], rtol=1e-6)
    np.testing.assert_array_equal(source.read("norm"), plain)


def test_mxfp4_experts_have_the_values_of_the_specification(tmp_path):
    E, rows, groups = 3, 5, 2
    blocks = rng().integers(256, size=(E, rows, groups, 16)).astype(np.uint8)
    scales = rng().integers(100, 140, size=(E, rows, groups)).astype(np.uint8)

    def value(code: int) -> float:  # sign, two bits of exponent, one of mantissa
        sign, exponent, mantissa = -1 if code & 8 else 1, code >> 1 & 3, code & 1
        return sign * (mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2 ** (exponent - 1))

    weight = np.zeros((E, 32 * groups, rows))
    for e, row, g, n in np.ndindex(E, rows, groups, 32):
        code = int(blocks[e, row, g, n // 2]) >> 4 * (n % 2) & 15
        weight[e, 32 * g + n, row] = value(code) * 2.0 ** (int(scales[e, row, g]) - 127)
    tensors = {"up_blocks": blocks, "up_scales": scales}
    source = dequantised(opened(tmp_path, {"quant_method": "mxfp4"}, tensors))
    np.testing.assert_array_equal(source.read("up"), weight)
    np.testing.assert_array_equal(source.read_rows("up", 1, 2), weight[1:2])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method = 'bitsandbytes' is not supp"),
        ({"quant_method": "hqq"}, "quant_method = 'hqq'"), ({"bits": 4}, "quant_method = ''"),
        ({"quant_method": "awq", "bits": 3}, "bits = 3"),
        ({"quant_method": "awq", "version": "gemv"}, "version = 'gemv'.*gemm"),
        ({"quant_method": "gptq", "bits": 3}, "bits = 3 .*2, 4, 8"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format = 'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "is_marlin_format"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "format = 'nvfp4"),
        (
            {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config.format = 'sparse-24-bitmask'",
        ),
        ({"quant_method": "compressed-tensors", "transform_config": {"a": 1}}, "transform_config"),
    ],
)  # fmt: skip
def test_other_methods_are_refused_by_name_when_a_model_is_opened(config, message, tmp_path):
    folder = write_hf(tmp_path / "model", LLAMA | {"quantization_config": config}, hf_tensors(LLAMA))
    with pytest.raises(WeightsError, match=message) as raised:
        open_model(folder)
    assert str(folder) in str(raised.value)
    if "quant_method =" in message:
        assert SUPPORTED in str(raised.value)


def test_a_method_told_in_a_file_of_its_own_is_refused_by_name(tmp_path):
    folder = write_hf(tmp_path / "model", LLAMA, hf_tensors(LLAMA))
    open_model(folder).close()
    (folder / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}}))
    with pytest.raises(WeightsError, match=r"hf_quant_config.json: producer.name = 'modelopt'"):
        open_model(folder)


@pytest.mark.parametrize("name", [name for name in FORMS if name != "compressed fp8 tensor"])
def test_a_part_that_is_missing_or_of_another_shape_is_named(name, tmp_path):
    config, tensors, _ = FORMS[name]()
    optional = (".g_idx", "_zero_point", "_g_idx")
    for part in tensors:
        if part.endswith((".weight", ".qweight", "_packed")) or part.endswith(optional):
            continue
        rest = {key: value for key, value in tensors.items() if key != part}
        with pytest.raises(WeightsError, match=f"{part}|{part.replace('_scale', '_scale_inv')}"):
            dequantised(opened(tmp_path, config, rest))
        wrong = np.zeros((7, 5, 3), tensors[part].dtype)
        with pytest.raises(WeightsError, match=f"{part}'.* expected|{part}'.* axes"):
            dequantised(opened(tmp_path, config, rest | {part: wrong}))


def test_packed_tensors_without_a_word_of_how_are_no_weights(tmp_path):
    stored = {name: (w * 8).astype(np.int8) for name, w in hf_tensors(LLAMA).items()}
    model = open_model(write_hf(tmp_path / "model", LLAMA, stored))
    with pytest.raises(WeightsError, match="is I8; F32, F16, BF16 can be read"):
        model.load_params("float32")


def test_a_model_of_fp8_loads_as_its_plain_form_rounded(tmp_path):
    plain, config = hf_tensors(LLAMA), {"quant_method": "fp8", "weight_block_size": [8, 8]}
    stored, rounded = {}, {}
    for name, w in plain.items():
        stored[name] = rounded[name] = w
        if "proj" in name:
            shape = tuple(-(-size // 8) for size in w.shape)
            scale = np.random.default_rng(len(name)).uniform(0.1, 1, shape)
            stored[name + "_scale_inv"] = scale = scale.astype(np.float32)
            full = np.kron(scale, np.ones((8, 8), np.float32))[: w.shape[0], : w.shape[1]]
            stored[name] = (w / full).astype(ml_dtypes.float8_e4m3fn)
            rounded[name] = stored[name].astype(np.float32) * full
    quantised = open_model(write_hf(tmp_path / "8", LLAMA | {"quantization_config": config}, stored))
    wanted = open_model(write_hf(tmp_path / "32", LLAMA, rounded)).load_params("float32")
    for name, array in quantised.load_params("float32").items():
        np.testing.assert_array_equal(array, wanted[name])
