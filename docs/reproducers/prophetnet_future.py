"""The first outputs move with later tokens in float32: hidden places are not hidden from queries near the start."""

import sys

import torch
from transformers import ProphetNetConfig, ProphetNetForCausalLM

COVERS = {
    "future": ["prophetnet"],
    "padding": ["prophetnet"],
    "batch": ["prophetnet"],
    "polarity": ["prophetnet"],
}

torch.manual_seed(0)
config = ProphetNetConfig(
    vocab_size=99, hidden_size=32, num_decoder_layers=2, num_decoder_attention_heads=4, decoder_ffn_dim=48,
    num_encoder_layers=2, num_encoder_attention_heads=4, encoder_ffn_dim=48, max_position_embeddings=64, ngram=2,
)  # fmt: skip
model = ProphetNetForCausalLM(config).eval()
for weight in model.parameters():
    if weight.dim() == 2:
        torch.nn.init.normal_(weight, std=0.3)
ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
worst = 0.0
with torch.no_grad():
    before = model(ids, use_cache=False).logits
    for key in range(1, 6):
        other = ids.clone()
        other[0, key] = 50
        moved = (model(other, use_cache=False).logits - before)[0, :key].abs().max()
        print(f"token {key} changed: an output before it moves by {float(moved):.1e}")
        worst = max(worst, float(moved))
padded, mask = torch.cat([ids, ids[:, :2]], 1), torch.tensor([[1] * 6 + [0] * 2])
with torch.no_grad():
    apart = (model(padded, attention_mask=mask, use_cache=False).logits[:, :6] - before).abs().max()
print("row padded on the right against the same row alone:", float(apart))
sys.exit(worst > 1e-4 or float(apart) > 1e-3)
