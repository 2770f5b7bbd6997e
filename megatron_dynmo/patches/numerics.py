"""Additions whose order depends on the pipeline layout, put in an order that does not.

For balance mode only: the results differ from stock Megatron's in the last bits.
"""

from __future__ import annotations

from megatron_dynmo.adapters.grad_norm import exact_grad_norm
from megatron_dynmo.adapters.layer_reductions import by_layer, by_layer_if_order_matters
from megatron_dynmo.patching import Kind, PatchSpec

_FINALIZE = "megatron.core.distributed.finalize_model_grads"


def specs() -> tuple[PatchSpec, ...]:
    """Return the patches that make a training step independent of the layout."""
    return (
        PatchSpec(
            name="exact-grad-norm",
            target="megatron.core.optimizer.clip_grads:get_grad_norm_fp32",
            kind=Kind.WRAP,
            factory=exact_grad_norm,
            params=("grads_for_norm", "norm_type", "grad_stats_parallel_group"),
            bindings=(
                "megatron.core.optimizer.optimizer:get_grad_norm_fp32",
                "megatron.core.optimizer.layer_wise_optimizer:get_grad_norm_fp32",
            ),
            reason="squares are added in fp32 tensor after tensor and rank after rank, so a moved "
            "layer changes the norm, and clipping every weight",
            seam_tried="--clip-grad 0 leaves clipping out; optimizer step hooks run after it",
            remove_when="upstream offers a reproducible norm",
        ),
        PatchSpec(
            name="tp-reduction-by-layer",
            target=f"{_FINALIZE}:_allreduce_non_tensor_model_parallel_grads",
            kind=Kind.WRAP,
            factory=by_layer_if_order_matters,
            params=("model", "config", "tp_group"),
            bindings=(f"{_FINALIZE}:_allreduce_layernorm_grads",),
            reason="one buffer for all layers of a stage: among three tensor-parallel ranks or "
            "more the order of additions follows the place in it",
            seam_tried="config.finalize_model_grads_func: it holds all reductions, not this one",
            remove_when="upstream reduces layer by layer, or in an order free of the place",
        ),
        PatchSpec(
            name="router-bias-by-layer",
            target=f"{_FINALIZE}:_update_router_expert_bias",
            kind=Kind.WRAP,
            factory=by_layer,
            params=("model", "config", "tp_dp_cp_group"),
            reason="token counts of all routers of a stage are reduced and averaged in one tensor, "
            "whose shape follows the layout",
            seam_tried="config.finalize_model_grads_func: it holds all reductions, not this one",
            remove_when="upstream updates each router by itself",
        ),
        PatchSpec(
            name="router-quantile-by-layer",
            target=f"{_FINALIZE}:_update_router_qb_beta",
            kind=Kind.WRAP,
            factory=by_layer,
            params=("model", "config", "dp_cp_group"),
            reason="quantiles of all routers of a stage are averaged in one tensor, whose shape "
            "follows the layout",
            seam_tried="config.finalize_model_grads_func: it holds all reductions, not this one",
            remove_when="upstream updates each router by itself",
        ),
    )
