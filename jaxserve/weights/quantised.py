"""Quantised Hugging Face checkpoints: each quantised tensor under its plain name, dequantised as it is read.

How a checkpoint was quantised is told by `quantization_config` of its config.json. A method that isn't here
is refused by its name: packed values taken for weights would be a model that talks nonsense.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np

from jaxserve.errors import WeightsError
from jaxserve.models.metadata import Metadata, refuse
from jaxserve.weights.quantised_forms import (
    GPTQ_BITS,
    PACKED_BITS,
    Awq,
    Blocks,
    Form,
    Gptq,
    Mxfp4,
    PackedRows,
    Scaled,
)
from jaxserve.weights.safetensors import SafetensorsSource, read_json
from jaxserve.weights.source import TensorInfo, TensorSource

AT = "quantization_config."
FLOAT8 = ("F8_E4M3", "F8_E5M2")
COMPRESSED = ("dense", "float-quantized", "int-quantized", "naive-quantized", "pack-quantized")
# Scales of activations, which stay as they are.
ACTIVATIONS = ("input_scale", "input_zero_point", "output_scale", "k_scale", "v_scale")


def dequantised(source: SafetensorsSource) -> TensorSource:
    """`source`, or a view of it in which nothing is quantised. Raises WeightsError for another method."""
    described = source.metadata.get("quantization_config") or source.metadata.get("compression_config")
    if described is None:
        if (elsewhere := source.path / "hf_quant_config.json").exists():
            producer = Metadata(read_json(elsewhere)).get("producer", dict, {})
            refuse("hf_quant_config.json: producer.name", producer.get("name"), SUPPORTED)
        return source
    if not isinstance(described, dict):
        raise WeightsError(f"quantization_config = {described!r}: expected an object")
    meta = Metadata(described)
    method = meta.get("quant_method", str, "")
    if method not in METHODS:
        refuse(AT + "quant_method", method, SUPPORTED)
    return _Dequantised(source, METHODS[method](source, meta))


class _Dequantised:
    """A TensorSource whose `forms`, by plain name, stand in place of the tensors that they are made of."""

    format: Literal["gguf", "safetensors"] = "safetensors"

    def __init__(self, source: SafetensorsSource, forms: Mapping[str, Form]):
        self.path, self.metadata = source.path, source.metadata
        self._source, self._forms = source, forms
        used = {name for form in forms.values() for name in form.names}
        used |= {name for name in source.tensors if name.rsplit(".", 1)[-1] in ACTIVATIONS}
        tensors = {name: info for name, info in source.tensors.items() if name not in used}
        for name, form in forms.items():
            if name in tensors:
                raise WeightsError(f"{self.path}: tensor {name!r} is there twice, quantised and as it is")
            nbytes = sum(source.tensors[part].nbytes for part in form.names)
            tensors[name] = TensorInfo(name, form.shape, form.dtype, nbytes)
        self.tensors: Mapping[str, TensorInfo] = tensors

    def read(self, name: str) -> np.ndarray:
        """The whole tensor; float32 where it was quantised."""
        if (form := self._forms.get(name)) is None:
            return self._source.read(name)
        return form.rows(0, form.shape[0])

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) along axis 0."""
        if (form := self._forms.get(name)) is None:
            return self._source.read_rows(name, start, stop)
        return form.rows(start, stop)

    def close(self) -> None:
        self._source.close()


def _stems(source: SafetensorsSource, ending: str) -> list[str]:
    return [name.removesuffix(ending) for name in source.tensors if name.endswith(ending)]


def _mxfp4(source: SafetensorsSource, meta: Metadata) -> dict[str, Form]:
    return {stem: Mxfp4(source, stem) for stem in _stems(source, "_blocks")}


def _awq(source: SafetensorsSource, meta: Metadata) -> dict[str, Form]:
    if (bits := meta.get("bits", int, None) or meta.get("w_bit", int, 4)) != 4:
        refuse(AT + "bits", bits, "4")
    if (version := meta.get("version", str, "gemm")).lower() != "gemm":
        refuse(AT + "version", version, "gemm")
    return {stem + ".weight": Awq(source, stem) for stem in _stems(source, ".qweight")}


def _gptq(source: SafetensorsSource, meta: Metadata) -> dict[str, Form]:
    if (bits := meta.need("bits", int)) not in GPTQ_BITS:
        refuse(AT + "bits", bits, ", ".join(map(str, GPTQ_BITS)))
    format = meta.get("checkpoint_format", str, "gptq")
    if format not in (offsets := {"gptq": 1, "gptq_v2": 0}):
        refuse(AT + "checkpoint_format", format, ", ".join(offsets))
    if meta.get("is_marlin_format", bool, False):
        refuse(AT + "is_marlin_format", True, "false")
    size = meta.get("group_size", int, None) or -1
    return {
        stem + ".weight": Gptq(source, stem, bits, size, offsets[format])
        for stem in _stems(source, ".qweight")
    }


def _fp8(source: SafetensorsSource, meta: Metadata) -> dict[str, Form]:
    block = meta.get("weight_block_size", list, None)
    if block is not None and (len(block) != 2 or not all(isinstance(n, int) and n > 0 for n in block)):
        refuse(AT + "weight_block_size", block, "two whole numbers above 0, or null")
    forms: dict[str, Form] = {}
    for name, info in source.tensors.items():
        if info.dtype in FLOAT8:
            scale = _scale_of(source, name, "_scale_inv", "_scale")
            if block is None or len(source.tensors[scale].shape) < 2:
                forms[name] = Scaled(source, name, scale)
            else:
                forms[name] = Blocks(source, name, scale, (block[0], block[1]))
    return forms


def _compressed(source: SafetensorsSource, meta: Metadata) -> dict[str, Form]:
    if (format := meta.get("format", str, "dense")) not in COMPRESSED:
        refuse(AT + "format", format, ", ".join(COMPRESSED))
    sparsity = Metadata(meta.get("sparsity_config", dict, {})).get("format", str, "dense")
    if sparsity != "dense":
        refuse(AT + "sparsity_config.format", sparsity, "dense")
    if transform := meta.get("transform_config", dict, {}):
        refuse(AT + "transform_config", transform, "none")
    forms: dict[str, Form] = {}
    if packed := _stems(source, ".weight_packed"):
        groups = meta.need("config_groups", dict).values()
        widths = list({(group.get("weights") or {}).get("num_bits") for group in groups})
        if len(widths) != 1 or (bits := widths[0]) not in PACKED_BITS:
            refuse(AT + "config_groups.*.weights.num_bits", widths, "one number, 4 or 8")
        forms |= {stem + ".weight": PackedRows(source, stem, bits) for stem in packed}
    for name, info in source.tensors.items():
        if info.dtype in (*FLOAT8, "I8") and name.endswith(".weight"):
            forms[name] = Scaled(source, name, _scale_of(source, name, "_scale"), name + "_zero_point")
    return forms


def _scale_of(source: SafetensorsSource, name: str, *endings: str) -> str:
    for ending in endings:
        if name + ending in source.tensors:
            return name + ending
    dtype, scale = source.tensors[name].dtype, name + endings[0]
    raise WeightsError(f"{source.path}: tensor {name!r} is {dtype}, and its scale {scale!r} is missing")


METHODS: dict[str, Callable[[SafetensorsSource, Metadata], dict[str, Form]]] = {
    "awq": _awq,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "gptq": _gptq,
    "mxfp4": _mxfp4,
}
SUPPORTED = ", ".join(METHODS)
