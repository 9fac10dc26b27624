"""A Hugging Face model trained with its sequences dealt over ranks, beside the same model on one process with torch's attention."""

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig

from ringspan.fronts import transformers as ringspan_hf

dist.init_process_group("gloo")
front = ringspan_hf.register(group=dist.group.WORLD, sharding="zigzag")  # in AttentionInterface and AttentionMaskInterface
size = dict(vocab_size=200, hidden_size=96, intermediate_size=128, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2)


def model(attention):
    torch.manual_seed(0)  # the same weights everywhere; a real run says from_pretrained(..., attn_implementation="ringspan")
    made = AutoModelForCausalLM.from_config(LlamaConfig(**size, initializer_range=0.1), attn_implementation=attention)
    return made, torch.optim.SGD(made.parameters(), lr=0.5)


ids = torch.randint(200, (2, 301), generator=torch.Generator().manual_seed(1))  # the same on all ranks; this one works on a part
ours, optimizer = model("ringspan")
theirs, reference = model("sdpa")
for step in range(2):
    loss = ours(**front.shard(ids, labels=ids), use_cache=False).loss  # this rank's share of the mean over all tokens
    optimizer.zero_grad()
    loss.backward()
    for parameter in ours.parameters():
        dist.all_reduce(parameter.grad)  # a sum, since the shares add up
    optimizer.step()
    dist.all_reduce(loss.detach())

    whole = theirs(ids, labels=ids).loss
    reference.zero_grad()
    whole.backward()
    reference.step()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.6f} on {dist.get_world_size()} ranks, {whole.item():.6f} with sdpa on one")
dist.destroy_process_group()
