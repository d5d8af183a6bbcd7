"""Padding flows into real tokens past the attention_mask: by convolution, hashes, or the embeddings of neighbours."""

import sys

import torch
from transformers import (
    MobileBertConfig,
    MobileBertForMaskedLM,
    NystromformerConfig,
    NystromformerForMaskedLM,
    YosoConfig,
    YosoForMaskedLM,
)

COVERS = {
    "padding": ["mobilebert", "nystromformer", "yoso"],
    "batch": ["mobilebert", "nystromformer", "yoso"],
    "loss": ["mobilebert", "nystromformer", "yoso"],
    "mask_ignored": ["mobilebert", "nystromformer", "yoso"],
}

sizes = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
sizes |= {"num_attention_heads": 4, "max_position_embeddings": 64}
models = (
    (MobileBertConfig(**sizes, embedding_size=32, intra_bottleneck_size=32), MobileBertForMaskedLM),
    (NystromformerConfig(**sizes), NystromformerForMaskedLM),
    (YosoConfig(**sizes), YosoForMaskedLM),
)
ids, other = torch.tensor([[5, 6, 7, 8, 0, 0]]), torch.tensor([[5, 6, 7, 8, 50, 60]])
mask = torch.tensor([[1, 1, 1, 1, 0, 0]])
wrong = False
for config, model_class in models:
    torch.manual_seed(0)
    model = model_class(config).eval()
    for weight in model.parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=0.3)
    with torch.no_grad():
        first = model(ids, attention_mask=mask).logits[:, :4]
        second = model(other, attention_mask=mask).logits[:, :4]
        alone = model(ids[:, :4]).logits
    moved, apart = float((first - second).abs().max()), float((first - alone).abs().max())
    print(f"{model_class.__name__}: ids under the mask move real tokens by {moved:.1e}; against alone {apart:.1e}")
    wrong |= moved > 1e-4 or apart > 1e-4
sys.exit(wrong)
