"""How evenly the experts were used: metrics for each layer, from the counts that the routers keep."""

import torch
import torch.distributed as dist

from megagrpo.models.experts import SequenceRouter
from megagrpo.models.spec import sparse_layers
from megagrpo.models.stage import StageModel


class RouterLoads:
    """Reads the routers of this rank's stage."""

    def __init__(self, model: StageModel):
        self.model = model
        modules = (module for chunk in model.chunks for module in chunk.modules())
        self.routers = {
            module.layer_number - 1: module for module in modules if isinstance(module, SequenceRouter)
        }

    def take(self, updates: int) -> dict[str, float]:
        """Return the metrics of the sequences trained in the last `updates`, and start counting from 0.
        Collective over all ranks.

        expert_load_ratio/layer_K: tokens of the busiest expert of layer K over the mean of its experts; 1 is
        even, E / top-k the worst.
        expert_load_ratio: the largest of them.
        expert_idle_fraction: experts of all layers that got no token.
        router_aux_loss: sum over layers, mean over updates, coefficient included; only where there is
        one.
        """
        experts = self.model.hf.num_experts
        totals = torch.zeros(self.model.hf.num_layers, experts + 1, dtype=torch.float64)
        if self.routers:
            counted = [torch.cat((each.load, each.balance_loss[None])) for each in self.routers.values()]
            totals[list(self.routers)] = torch.stack(counted).cpu()  # the one copy from the device
        for router in self.routers.values():
            router.reset()
        dist.all_reduce(totals)
        sparse = sparse_layers(self.model.config)
        loads = totals[sparse, :experts]
        metrics: dict[str, float] = {}
        if loads.sum() > 0:
            ratios = loads.amax(1) / loads.mean(1)
            metrics = {
                f"expert_load_ratio/layer_{layer}": float(ratio)
                for layer, ratio in zip(sparse, ratios, strict=True)
            }
            metrics |= {
                "expert_load_ratio": float(ratios.max()),
                "expert_idle_fraction": float((loads == 0).double().mean()),
            }
        if self.model.config.moe_aux_loss_coeff:
            metrics["router_aux_loss"] = float(totals[:, experts].sum()) / max(1, updates)
        return metrics
