"""Two contracts over the same weights.

A file of weights says nothing about who may see whom, how positions are told apart, or where a norm sits. Here the
same bytes are saved twice, with two configs that fit every one of their shapes; the two folders generate different
text, and each proves by its witness which of the two it is. Then one folder is given the other's config, with every
digest made to fit: names, shapes and digests agree, and only the witness tells.

    python examples/two_contracts.py
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pellucid as pl
from pellucid.checkpoints import verify
from pellucid.checkpoints.contract import with_digest


def configs() -> tuple[pl.ModelConfig, pl.ModelConfig]:
    """One model whose layers see everything before them, and one that sees three tokens and turns other pairs."""
    shared = {
        "vocab_size": 96,
        "hidden_size": 32,
        "attention": {"num_attention_heads": 4},
        "ffn": {"kind": "gated", "intermediate_size": 64},
    }
    wide = pl.ModelConfig(**shared, layers=["causal", "causal"])
    narrow = pl.ModelConfig(**shared, layers=["causal & window(3)"] * 2, position={"kind": "rope", "interleaved": True})
    return wide, narrow


def main() -> None:
    wide, narrow = configs()
    first, second = pl.build(wide, seed=4), pl.build(narrow)
    second.load_state_dict(first.state_dict())  # every name and every shape fits

    with tempfile.TemporaryDirectory() as folder:
        paths = {"wide": Path(folder, "wide"), "narrow": Path(folder, "narrow")}
        pl.save(paths["wide"], first)
        pl.save(paths["narrow"], second)
        bytes_of = {name: (path / "model.safetensors").read_bytes() for name, path in paths.items()}
        print("same weights:", bytes_of["wide"] == bytes_of["narrow"])

        batch = pl.Batch.from_rows([[5, 8, 2, 9, 31, 7]])
        logits = {name: pl.load(path, check="witness").model(batch).logits for name, path in paths.items()}
        far = (logits["wide"] - logits["narrow"]).abs().amax((0, 2))
        print("logits differ, token by token:", [f"{x:.3f}" for x in far.tolist()])

        contract = paths["wide"] / "pellucid.json"
        data = json.loads(contract.read_text())
        data["model"] = json.loads((paths["narrow"] / "pellucid.json").read_text())["model"]
        contract.write_text(json.dumps(with_digest(data)))
        for level in ("headers", "digests", "witness"):
            found = verify(paths["wide"], level)
            print(f"{level}: {'passed' if found.passed else found.problem.partition(': ')[2]}")


if __name__ == "__main__":
    main()
