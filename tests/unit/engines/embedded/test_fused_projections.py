"""Fused projections give the layers' own outputs, and follow weights that are written in place."""

import pytest
import torch

from megagrpo.engines.embedded.fused_projections import fuse_query_key_value


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_fused_model_equals_itself_and_follows_in_place_writes(tiny_model, family):
    model = tiny_model(family)
    tokens = torch.arange(3, 15)[None]
    with torch.no_grad():
        before = model(tokens).logits
        names = [name for name, _ in model.named_parameters()]
        fuse_query_key_value(model)
        assert [name for name, _ in model.named_parameters()] == names
        torch.testing.assert_close(model(tokens).logits, before, rtol=1e-5, atol=1e-5)
        model.model.layers[1].self_attn.k_proj.weight.copy_(torch.zeros(()))  # a publish writes in place
        changed = model(tokens).logits
        assert (changed - before).abs().max() > 1e-3
        separate = tiny_model(family)
        separate.model.layers[1].self_attn.k_proj.weight.zero_()
        torch.testing.assert_close(changed, separate(tokens).logits, rtol=1e-5, atol=1e-5)
