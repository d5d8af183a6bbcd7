"""Left-padded text goes on wrongly from a cache: the mask is taken to lack image tokens that are not there.

With a cache and a 2D mask GIT puts ones for its image patches before the mask, text alone included, so that the mask
hides other slots than those of the padding.
"""

import sys

import torch
from transformers import GitConfig, GitForCausalLM

COVERS = {"cache": ["git"], "positions": ["git"]}

torch.manual_seed(0)
vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
vision |= {"image_size": 28, "patch_size": 14}
config = GitConfig(
    vision_config=vision, vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
    intermediate_size=48, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
model = GitForCausalLM(config).eval()
for weight in model.parameters():
    if weight.dim() == 2:
        torch.nn.init.normal_(weight, std=0.3)
ids, mask = torch.tensor([[0, 0, 5, 6, 7, 8]]), torch.tensor([[0, 0, 1, 1, 1, 1]])
places = (mask.cumsum(1) - 1).clamp(min=0)

with torch.no_grad():
    whole = model(ids, attention_mask=mask, position_ids=places, use_cache=False).logits[:, 5:]
    cache = model(ids[:, :5], attention_mask=mask[:, :5], position_ids=places[:, :5], use_cache=True).cache
    step = model(ids[:, 5:], attention_mask=mask, position_ids=places[:, 5:], cache=cache, use_cache=True).logits

print("last token through the cache, against the whole row at once:", float((step - whole).abs().max()))
sys.exit(float((step - whole).abs().max()) > 1e-4)
