"""With use_cache=True the decoder has no causal mask: several tokens at once see each other both ways."""

import sys

import torch
from transformers import FSMTConfig, FSMTForConditionalGeneration

COVERS = {"future": ["fsmt"], "cache": ["fsmt"]}

torch.manual_seed(0)
config = FSMTConfig(
    src_vocab_size=99, tgt_vocab_size=99, langs=["a", "b"], d_model=32, encoder_layers=2, decoder_layers=2,
    encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48,
)  # fmt: skip
model = FSMTForConditionalGeneration(config).eval()
for weight in model.parameters():
    if weight.dim() == 2:
        torch.nn.init.normal_(weight, std=0.3)
source = torch.tensor([[5, 6, 7]])
ids, other = torch.tensor([[8, 9, 10, 11]]), torch.tensor([[8, 9, 10, 50]])
moved = {}
with torch.no_grad():
    for cached in (False, True):
        first = model(input_ids=source, decoder_input_ids=ids, use_cache=cached).logits
        second = model(input_ids=source, decoder_input_ids=other, use_cache=cached).logits
        moved[cached] = float((first - second)[:, :3].abs().max())
        print(f"use_cache={cached}: outputs 0 to 2 move when token 3 changes by {moved[cached]:.1e}")
sys.exit(moved[True] > 1e-4)
