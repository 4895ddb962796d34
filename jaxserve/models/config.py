"""The shape of a decoder, whatever family it comes from."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from jaxserve.errors import ConfigError, WeightsError


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How RoPE's D/2 frequencies, theta^(-2i/D), are changed. See models/rope_scaling.py for the methods."""

    factors: tuple[float, ...] = ()  # what each frequency is divided by; (): by 1
    long_factors: tuple[float, ...] = ()  # in place of `factors` where the context is longer than `original`
    attention_factor: float = 1.0  # cosines and sines are multiplied by it
    ntk_factor: float | None = None  # theta grows with the context's length beyond `original`, times this
    original: int | None = None  # tokens that the frequencies were trained for, where the above need it


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What may differ from layer to layer. `window` None attends to the whole context."""

    window: int | None
    rope_theta: float | None  # None: no RoPE
    rope: RopeScaling = RopeScaling()


@dataclass(frozen=True, slots=True)
class MoEConfig:
    """A feed-forward block of experts, of which a token takes those with the largest router logits."""

    num_experts: int
    num_active: int  # experts a token
    expert_size: int  # width of an expert
    normalise: bool  # the weights of a token's experts sum to 1, as if the others were not there
    shared_size: int = 0  # width of an expert that all tokens take beside these; 0: none
    router_bias: bool = False
    expert_bias: bool = False
    # Of deepseek (models/latent.py):
    shared_gate: bool = True  # what all tokens take is weighed by a router of its own
    sigmoid: bool = False  # each logit by itself, in place of a softmax
    choice_bias: bool = False  # added to what experts are chosen by, not to their weights
    num_groups: int = 1  # of experts; the active ones are in
    active_groups: int = 1  # so many of these
    scale: float = 1.0  # of the weights
    dense_layers: int = 0  # first ones, which have an MLP


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Attention whose keys and values are made of one latent vector a token: see models/latent.py."""

    rank: int  # of the latent vector
    query_rank: int | None  # queries are made of one too; None: they aren't
    nope_dim: int  # of a query and key head: what RoPE leaves alone
    rope_dim: int  # and what it turns
    value_dim: int  # of a value head


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer. Made by a family's translation, stored in converted checkpoints.

    Raises WeightsError for figures that no decoder can have.
    """

    family: str  # "llama", "gemma3"
    vocab_size: int  # rows of the embedding
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int  # context length the model was trained for
    rms_norm_eps: float
    attention_scale: float
    activation: str  # of ops/gate.py
    tie_embeddings: bool
    embedding_scale: float | None  # embeddings are multiplied by it (gemma)
    qk_norm: bool  # RMS norm on each query and key head (gemma3), or with `wide_qk_norm` on all heads at once
    post_norms: bool  # norms after attention and MLP too (gemma3)
    layers: tuple[LayerConfig, ...]
    wide_qk_norm: bool = False
    pre_norms: bool = True  # norms before attention and MLP
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    rotary_dim: int | None = None  # leading values of a head that RoPE turns; None: all
    attention_soft_cap: float | None = None  # a score s becomes cap * tanh(s / cap)
    logit_soft_cap: float | None = None  # the same, of logits
    attention_sinks: bool = False  # each head has one more, constant score, that goes nowhere
    residual_scale: float = 1.0  # of what attention and MLP add
    logit_scale: float = 1.0
    moe: MoEConfig | None = None  # in place of the MLP
    latent: LatentConfig | None = None  # with one kv head, the latent vector with what RoPE turns

    def __post_init__(self) -> None:
        for name in (
            "vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim",
            "max_position", "num_layers",
        ):  # fmt: skip
            _require(name, value := getattr(self, name), isinstance(value, int) and value >= 1, "at least 1")
        _require("head_dim", self.head_dim, self.head_dim % 2 == 0, "even, for RoPE turns pairs")
        _require(
            "num_heads", self.num_heads, self.num_heads % self.num_kv_heads == 0,
            f"a multiple of num_kv_heads, {self.num_kv_heads}",
        )  # fmt: skip
        rotary_dim = self.head_dim if self.rotary_dim is None else self.rotary_dim
        _require(
            "rotary_dim", rotary_dim, rotary_dim % 2 == 0 and 0 < rotary_dim <= self.head_dim,
            f"even, and at most the head size, {self.head_dim}",
        )  # fmt: skip
        for layer in self.layers:
            theta = layer.rope_theta
            _require("rope_theta", theta, theta is None or 0 < theta < math.inf, "a number above 0")
            for factors in (layer.rope.factors, layer.rope.long_factors):
                _require("RoPE factors", factors, len(factors) in (0, rotary_dim // 2), f"{rotary_dim // 2}")
            _require("window", layer.window, layer.window is None or layer.window >= 1, "at least 1")
        for name in ("rms_norm_eps", "attention_scale"):
            _require(name, value := getattr(self, name), 0 < value < math.inf, "a number above 0")

        if self.moe is not None:
            _require(
                "active experts", self.moe.num_active, 1 <= self.moe.num_active <= self.moe.num_experts,
                f"at most the number of experts, {self.moe.num_experts}",
            )  # fmt: skip
            groups = self.moe.num_groups
            divides = groups >= 1 and self.moe.num_experts % groups == 0
            _require("expert groups", groups, divides, f"a divisor of {self.moe.num_experts} experts")
            can = self.moe.active_groups * (self.moe.num_experts // groups) >= self.moe.num_active
            _require(
                "active groups", self.moe.active_groups, can and self.moe.active_groups <= groups,
                f"enough for {self.moe.num_active} experts, and at most the number of groups, {groups}",
            )  # fmt: skip

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def value_head_dim(self) -> int:
        """What the cache keeps as a value, beside a key: nothing where values are a part of keys."""
        return 0 if self.latent is not None else self.head_dim

    @property
    def window(self) -> int | None:
        """How many positions any layer sees, a query's own included; None when one sees all."""
        windows = [layer.window for layer in self.layers if layer.window is not None]
        return max(windows) if len(windows) == len(self.layers) else None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ModelConfig:
        """Inverse of `to_json`. Raises ConfigError that names a missing or unknown key."""
        try:
            layers = tuple(_layer_from_json(layer) for layer in data["layers"])
            moe, latent = data.get("moe"), data.get("latent")
            parts = {
                "layers": layers,
                "moe": None if moe is None else MoEConfig(**moe),
                "latent": None if latent is None else LatentConfig(**latent),
            }
            return cls(**{**data, **parts})
        except (KeyError, TypeError, WeightsError) as error:
            raise ConfigError(f"model config: {error}") from error


def _layer_from_json(data: dict[str, Any]) -> LayerConfig:
    rope: dict[str, Any] = dict(data.get("rope", {}))
    for key, value in rope.items():
        rope[key] = tuple(value) if isinstance(value, list) else value
    return LayerConfig(**{**data, "rope": RopeScaling(**rope)})


def _require(name: str, value: object, holds: bool, wanted: str) -> None:
    if not holds:
        raise WeightsError(f"the model's {name} is {value!r}, it must be {wanted}")
