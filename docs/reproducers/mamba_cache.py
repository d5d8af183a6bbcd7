"""Going on from a cache by more than one token starts the recurrent state at zero: what came before is forgotten.

The convolution reads its cached state, the scan does not (its initial state is always zeros).
"""

import sys

import torch
from transformers import FalconMambaConfig, FalconMambaForCausalLM, MambaConfig, MambaForCausalLM

COVERS = {"cache": ["mamba", "falcon_mamba"]}

wrong = False
for config_class, model_class in ((MambaConfig, MambaForCausalLM), (FalconMambaConfig, FalconMambaForCausalLM)):
    torch.manual_seed(0)
    model = model_class(config_class(vocab_size=99, hidden_size=32, num_hidden_layers=2, state_size=8)).eval()
    ids = torch.randint(5, 99, (1, 9))
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits[:, 4:]
        start = model(ids[:, :4], use_cache=True)
        at_once = model(ids[:, 4:], cache=start.cache, use_cache=True).logits
        cache, steps = model(ids[:, :4], use_cache=True).cache, []
        for slot in range(4, 9):
            steps.append(model(ids[:, slot : slot + 1], cache=cache, use_cache=True).logits)
    by_one, by_five = (torch.cat(steps, 1) - whole).abs().max(), (at_once - whole).abs().max()
    print(
        f"{model_class.__name__}: one by one {float(by_one):.1e}, five at once {float(by_five):.1e}, both against no cache"
    )
    wrong |= float(by_five) > 1e-4
sys.exit(wrong)
