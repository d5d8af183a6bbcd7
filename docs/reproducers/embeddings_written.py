"""The caller's inputs_embeds are written into: CTRL multiplies them in place, GIT adds its positions to them in place.

The same tensor handed over twice gives two answers, and a gradient asked of it is refused.
"""

import sys

import torch
from transformers import CTRLConfig, CTRLLMHeadModel, GitConfig, GitForCausalLM

COVERS = {"trace": ["ctrl", "git"]}

torch.manual_seed(0)
vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
vision |= {"image_size": 28, "patch_size": 14}
models = (
    CTRLLMHeadModel(CTRLConfig(vocab_size=99, n_embd=32, dff=48, n_layer=1, n_head=4, n_positions=64)),
    GitForCausalLM(
        GitConfig(
            vision_config=vision, vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
            intermediate_size=48, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )
    ),
)  # fmt: skip
moved = []
for model in models:
    embeddings = torch.randn(1, 4, 32)
    kept = embeddings.clone()
    with torch.no_grad():
        model.eval()(inputs_embeds=embeddings)
    moved.append(float((embeddings - kept).abs().max()))
    print(f"{type(model).__name__}: the caller's embeddings have moved by", moved[-1])
sys.exit(min(moved) > 1e-4)
