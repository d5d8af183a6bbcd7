"""With ``causal=True`` the attention_mask is left out of attention: left padding is attended to."""

import sys

import torch
from transformers import XLMConfig, XLMWithLMHeadModel

COVERS = {"padding": ["xlm"], "mask_ignored": ["xlm"], "batch": ["xlm"], "positions": ["xlm"], "hidden_rows": ["xlm"]}

torch.manual_seed(0)
config = XLMConfig(vocab_size=99, emb_dim=32, n_layers=2, n_heads=4, causal=True, max_position_embeddings=64)
model = XLMWithLMHeadModel(config).eval()
for weight in model.parameters():
    torch.nn.init.normal_(weight, std=0.3)
ids, mask = torch.tensor([[2, 2, 5, 6, 7, 8]]), torch.tensor([[0, 0, 1, 1, 1, 1]])
places = (mask.cumsum(1) - 1).clamp(min=0)
with torch.no_grad():
    padded = model(ids, attention_mask=mask, position_ids=places).logits[:, 2:]
    alone = model(ids[:, 2:]).logits
print("left-padded row against the same row alone:", float((padded - alone).abs().max()))
sys.exit(float((padded - alone).abs().max()) > 1e-4)
