"""A left-padded row goes on wrongly from a cache: the attention_mask is not looked at there."""

import sys

import torch
from transformers import ReformerConfig, ReformerModelWithLMHead

COVERS = {"cache": ["reformer"], "positions": ["reformer"]}

torch.manual_seed(0)
config = ReformerConfig(
    vocab_size=99, hidden_size=32, num_attention_heads=4, attention_head_size=8, feed_forward_size=48, is_decoder=True,
    attn_layers=["local", "lsh"], axial_pos_embds=False, max_position_embeddings=64, num_buckets=4,
)  # fmt: skip
model = ReformerModelWithLMHead(config).eval()
for weight in model.parameters():
    if weight.dim() == 2:
        torch.nn.init.normal_(weight, std=0.3)
ids, mask = torch.tensor([[0, 0, 5, 6, 7, 8]]), torch.tensor([[0, 0, 1, 1, 1, 1]])
other = torch.tensor([[50, 60, 5, 6, 7, 8]])
places = (mask.cumsum(1) - 1).clamp(min=0)
with torch.no_grad():
    answers = []
    for row in (ids, other):
        start = model(row[:, :5], attention_mask=mask[:, :5], position_ids=places[:, :5], use_cache=True)
        given = {"attention_mask": mask, "position_ids": places[:, 5:], "use_cache": True}
        answers.append(model(row[:, 5:], past_buckets_states=start.past_buckets_states, **given).logits)
    whole = model(ids, attention_mask=mask, position_ids=places, use_cache=False).logits[:, 5:]
print("through the cache, ids under the mask move the last token by", float((answers[0] - answers[1]).abs().max()))
print("through the cache, against the whole row:", float((answers[0] - whole).abs().max()))
sys.exit(float((answers[0] - answers[1]).abs().max()) > 1e-4)
