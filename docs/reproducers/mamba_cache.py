"""Going on from a cache by more than one token starts the recurrent state at zero: what came before is forgotten.

The convolution reads its cached state, the scan does not (its initial state is always zeros).
"""

import sys

import torch
from transformers import (
    FalconMambaConfig,
    FalconMambaForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    ZambaConfig,
    ZambaForCausalLM,
)

COVERS = {"cache": ["mamba", "falcon_mamba", "jamba", "zamba"]}

mixed = {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "use_mamba_kernels": False}
models = (
    (MambaConfig(vocab_size=99, hidden_size=32, num_hidden_layers=2, state_size=8), MambaForCausalLM),
    (FalconMambaConfig(vocab_size=99, hidden_size=32, num_hidden_layers=2, state_size=8), FalconMambaForCausalLM),
    (JambaConfig(vocab_size=99, hidden_size=32, num_hidden_layers=2, attn_layer_period=2, attn_layer_offset=1,
                 num_experts=1, num_experts_per_tok=1, mamba_d_state=8, **mixed), JambaForCausalLM),
    (ZambaConfig(vocab_size=99, hidden_size=32, num_hidden_layers=5, attention_hidden_size=64, attention_head_dim=16,
                 layers_block_type=["mamba", "mamba", "hybrid", "mamba", "hybrid"], mamba_d_state=8,
                 **mixed | {"num_key_value_heads": 4}), ZambaForCausalLM),
)  # fmt: skip

wrong = False
for config, model_class in models:
    torch.manual_seed(0)
    model = model_class(config).eval()
    for name, weight in model.named_parameters():
        if weight.dim() >= 2 and "A_log" not in name:
            torch.nn.init.normal_(weight, std=0.3)
    ids = torch.randint(5, 99, (1, 9))
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits[:, 4:]
        start = model(ids[:, :4], use_cache=True)
        at_once = model(ids[:, 4:], cache=start.cache, use_cache=True).logits
        cache, steps = model(ids[:, :4], use_cache=True).cache, []
        for slot in range(4, 9):
            steps.append(model(ids[:, slot : slot + 1], cache=cache, use_cache=True).logits)
    by_one, by_five = (torch.cat(steps, 1) - whole).abs().max(), (at_once - whole).abs().max()
    print(f"{model_class.__name__}, against no cache: one by one {float(by_one):.1e}, at once {float(by_five):.1e}")
    wrong |= float(by_five) > 1e-4
sys.exit(wrong)
