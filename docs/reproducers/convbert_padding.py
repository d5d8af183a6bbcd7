"""Padding flows into real tokens through the convolution of keys: the attention_mask stops it in attention only."""

import sys

import torch
from transformers import ConvBertConfig, ConvBertForMaskedLM

COVERS = {"padding": ["convbert"], "batch": ["convbert"], "loss": ["convbert"], "mask_ignored": ["convbert"]}

torch.manual_seed(0)
config = ConvBertConfig(
    vocab_size=99, hidden_size=32, embedding_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, max_position_embeddings=64,
)  # fmt: skip
model = ConvBertForMaskedLM(config).eval()
ids, other = torch.tensor([[5, 6, 7, 8, 0, 0]]), torch.tensor([[5, 6, 7, 8, 50, 60]])
mask = torch.tensor([[1, 1, 1, 1, 0, 0]])
with torch.no_grad():
    first = model(ids, attention_mask=mask).logits[:, :4]
    second = model(other, attention_mask=mask).logits[:, :4]
    alone = model(ids[:, :4]).logits
print("real tokens move when ids under the mask change:", float((first - second).abs().max()))
print("padded row against the same row alone:", float((first - alone).abs().max()))
sys.exit(float((first - second).abs().max()) > 1e-4)
