#!/usr/bin/env python3
"""Record what Hugging Face transformers answers for a tiny model of every family.

    python3 -m venv /tmp/hf && /tmp/hf/bin/pip install torch transformers safetensors numpy
    /tmp/hf/bin/python scripts/record_families.py               # all, into tests/models/families/
    /tmp/hf/bin/python scripts/record_families.py gemma3 phi3   # these alone

It runs in an environment of its own: jaxserve is not imported, and needs neither torch nor transformers.
Models are written as folders of safetensors under the names that transformers saves, read back by
transformers, and run in float32 with plain ("eager") attention and experts. What is recorded is checked
first: decoding with a cache agrees with none, no choice of a token or an expert is a near tie, and every kind
of tensor and every change of the config that family_configs.py lists changes the answer.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors import safe_open
from safetensors.numpy import save_file

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.models.family_configs import CASES, Case, Config  # noqa: E402
from tests.models.family_weights import Tensors, checksum, tensors  # noqa: E402

FOLDER = ROOT / "tests/models/families"
PROMPTS = {"long": 40, "short": 12}  # tokens: past every window and original length, and within
ROWS = {"long": (3, 11, 24, 39), "short": (11,)}  # prompt positions whose logits are recorded
DECODED = 12
CHANGED = 0.02  # what matters changes some logit by at least this
NEAR_TIE = 0.01  # between the best and the second best logit
SAME = 1e-4  # two ways through the same arithmetic
SHAKEN = 1e-2  # weights that differ by 1e-5; another choice of experts changes more
# Here transformers changes the frequencies with every token and leaves the keys in the cache as they are, so
# that answers depend on how a sequence was split.
SPLIT_DEPENDENT = ("llama-dynamic", "long")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CASES)}; all if none")
    args = parser.parse_args()
    if unknown := set(args.names) - CASES.keys():
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    prepare()
    for name in args.names or CASES:
        path = FOLDER / f"{name}.json"
        path.write_text(dumps(record(name, CASES[name])))
        print(f"{path.name}: {path.stat().st_size / 1e3:.1f} kB", flush=True)


def prepare() -> None:
    """Set torch and transformers up for what is done here, in the whole process."""
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def record(name: str, case: Case) -> dict[str, Any]:
    shapes = checkpoint_shapes(case.config)
    made = tensors(case.config, shapes)
    print(name)
    runs = {kind: clear_run(case.config, made, kind) for kind in PROMPTS}
    for kind, figures in runs.items():
        if (name, kind) != SPLIT_DEPENDENT:
            whole = logits(Model(case.config, made), figures["prompt"] + figures["ids"][:-1])
            apart = np.abs(whole[-1] - figures["last_logits"]).max()
            print(f"  {kind}: decoded and whole differ by {apart:.1e}")
            assert apart < SAME, "the cache changes the answer"
    check_sensitivity(case, made, runs["long"])
    return {
        "recorded_with": {"torch": torch.__version__, "transformers": transformers.__version__},
        "config": case.config,
        "shapes": shapes,
        "weights_crc32": checksum(made),
        "runs": runs,
    }


def clear_run(config: Config, made: Tensors, kind: str, first_seed: int = 0) -> dict[str, Any]:
    """Of a random prompt after which no token is a near tie, and the answer isn't one token over and over."""
    for seed in range(first_seed, first_seed + 100):
        prompt = np.random.RandomState(seed).randint(3, config["vocab_size"], PROMPTS[kind]).tolist()
        figures = run(config, made, prompt, kind)
        if figures["margin"] > NEAR_TIE and len(set(figures["ids"])) >= DECODED // 3:
            return figures
    raise SystemExit(f"no prompt of 100 ({kind}) is clear enough; choose other weights or sizes")


class Model:
    """A model that transformers read from a folder with these tensors."""

    def __init__(self, config: Config, made: Tensors, strict: bool = True):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config))
            save_file(made, Path(folder) / "model.safetensors", metadata={"format": "pt"})
            more = {}
            if "quantization_config" in config:
                more["quantization_config"] = transformers.Mxfp4Config(dequantize=True)
            self.model, info = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager",
                output_loading_info=True, **more,
            )  # fmt: skip
        wrong = {key: sorted(map(str, value)) for key, value in info.items() if value}
        if strict and wrong:
            raise SystemExit(f"{config['model_type']}: {wrong}")
        for parameter in self.model.parameters():
            assert parameter.dtype == torch.float32
        self.model.eval()


def logits(model: Model, ids: list[int]) -> np.ndarray:
    return model.model(torch.tensor([ids]), use_cache=False).logits[0].numpy()


def run(config: Config, made: Tensors, ids: list[int], kind: str) -> dict[str, Any]:
    """A prompt in one step, then greedy decoding, a token a step, with transformers' cache."""
    model = Model(config, made).model
    cache = transformers.DynamicCache(config=model.config)
    out = model(torch.tensor([ids]), cache=cache, use_cache=True).logits[0].numpy()
    rows = {str(at): out[at] for at in ROWS[kind]}
    decoded: list[int] = []
    margins = []
    last = out[-1]
    while True:
        second, best = np.partition(last, -2)[-2:]
        margins.append(float(best - second))
        decoded.append(int(last.argmax()))
        if len(decoded) == DECODED:
            break
        step = model(torch.tensor([decoded[-1:]]), cache=cache, use_cache=True)
        last = step.logits[0, -1].numpy()
    return {"prompt": ids, "logits": rows, "ids": decoded, "last_logits": last, "margin": min(margins)}


def check_sensitivity(case: Case, made: Tensors, figures: Mapping[str, Any]) -> None:
    ids = figures["prompt"]
    whole = logits(Model(case.config, made), ids)
    print(f"  logits: standard deviation {whole.std():.2f}, largest {np.abs(whole).max():.1f}")

    rng = np.random.default_rng(0)
    shaken = {
        key: x if x.dtype == np.uint8 else (x * (1 + 1e-5 * rng.standard_normal(x.shape))).astype(x.dtype)
        for key, x in made.items()
    }
    apart = np.abs(logits(Model(case.config, shaken), ids) - whole).max()
    print(f"  weights that differ by 1e-5: {apart:.1e}")
    assert apart < SHAKEN, "some choice of experts is a near tie"

    for kind in sorted({re.sub(r"\d+", "*", key) for key in made}):
        without = {key: x * 0 if re.sub(r"\d+", "*", key) == kind else x for key, x in made.items()}
        apart = np.abs(logits(Model(case.config, without), ids) - whole).max()
        assert apart > CHANGED, f"{kind} hardly matters: {apart:.1e}"
    for change in case.matters:
        config = {key: value for key, value in (case.config | change).items() if value is not None}
        apart = np.abs(logits(Model(config, made, strict=False), ids) - whole).max()
        print(f"  {json.dumps(change)[:80]}: {apart:.2f}")
        assert apart > CHANGED, f"{change} hardly matters: {apart:.1e}"


def checkpoint_shapes(config: Config) -> dict[str, list[int]]:
    """Names and shapes of the tensors in a folder that transformers saves, or that was published."""
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(plain))
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.from_pretrained(folder), dtype=torch.float32
        )
        model.save_pretrained(folder)
        with safe_open(Path(folder) / "model.safetensors", "np") as file:
            shapes = {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118
    if "quantization_config" in config:
        shapes = dict(pair for item in shapes.items() for pair in mxfp4(*item))
    return shapes


def mxfp4(name: str, shape: list[int]) -> list[tuple[str, list[int]]]:
    """How the published gpt-oss holds a tensor: experts as [experts, out, blocks of 32, bytes of a block]."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return [(name, shape)]
    experts, inner, outer = shape
    blocks = [experts, outer, inner // 32]
    return [(f"{name}_blocks", [*blocks, 16]), (f"{name}_scales", blocks)]


def dumps(value: Any, depth: int = 0) -> str:
    """JSON with a line per entry of the outer objects, and numbers of six digits."""
    if depth < 3 and isinstance(value, dict):
        inner = ",\n".join(f'{" " * depth} "{key}": {dumps(item, depth + 1)}' for key, item in value.items())
        return f"{{\n{inner}\n{' ' * depth}}}" + ("" if depth else "\n")
    if isinstance(value, np.ndarray):
        return "[" + ", ".join(f"{x:.6g}" for x in value.tolist()) + "]"
    if isinstance(value, dict) and any(isinstance(item, np.ndarray) for item in value.values()):
        return "{" + ", ".join(f'"{key}": {dumps(item, depth + 1)}' for key, item in value.items()) + "}"
    return f"{value:.6g}" if isinstance(value, float) and depth == 3 else json.dumps(value)


if __name__ == "__main__":
    main()
