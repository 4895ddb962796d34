from __future__ import annotations

from dataclasses import replace

import pytest

from jaxserve import native
from jaxserve.errors import ConfigError
from jaxserve.ops.backend import CHOICES, XLA, choose


def test_auto_takes_native_kernels_exactly_where_they_run():
    usable, _ = native.available()
    assert (choose().attention_name, choose().linear_name) == (("native",) * 2 if usable else ("xla",) * 2)


def test_xla_is_always_to_be_had():
    assert choose("xla", "xla") == replace(XLA, kernels="XLA's: they were asked for")


def test_attention_and_dense_layers_are_chosen_apart():
    if not native.available()[0]:
        pytest.skip("needs the C++ kernels")
    one, other = choose("native", "xla"), choose("xla", "native")
    assert (one.attention_name, one.linear_name) == ("native", "xla")
    assert one.linear is XLA.linear
    assert one.attention is not XLA.attention
    assert (other.attention_name, other.linear_name) == ("xla", "native")
    assert other.attention is XLA.attention
    assert other.linear is not XLA.linear


def test_heads_that_native_attention_does_not_take_go_to_xla_unless_it_was_asked_for():
    if not native.available()[0]:
        pytest.skip("needs the C++ kernels")
    chosen = choose(head_dim=100)
    assert (chosen.attention_name, chosen.linear_name) == ("xla", "native")
    assert choose(head_dim=80).attention_name == "native"
    with pytest.raises(ConfigError, match=r"attention_backend=native .* 100 values, .* multiples of 16"):
        choose("native", head_dim=100)


@pytest.mark.parametrize("flag", ["attention", "linear"])
def test_a_backend_that_can_not_run_is_an_error_that_says_why(monkeypatch, flag):
    monkeypatch.setattr(native, "available", lambda: (False, "no compiler was there"))
    with pytest.raises(ConfigError, match=f"{flag}_backend=native can't run here: no compiler was there"):
        choose(**{flag: "native"})
    assert choose() == replace(XLA, kernels="XLA's: no compiler was there")


@pytest.mark.parametrize("flag", ["attention", "linear"])
def test_an_unknown_backend_is_named_with_the_choices(flag):
    with pytest.raises(ConfigError, match=f"{flag}_backend: 'cuda' is unknown") as raised:
        choose(**{flag: "cuda"})
    assert all(choice in str(raised.value) for choice in CHOICES)


def test_native_kernels_are_refused_off_the_cpu(monkeypatch):
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    with pytest.raises(ConfigError, match="attention_backend=native can't run here"):
        choose(attention="native")
    assert choose() == replace(XLA, kernels="XLA's: the native kernels run on CPU only")
