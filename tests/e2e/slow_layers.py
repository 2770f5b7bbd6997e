"""Be one rank of the drop-in whose layers take a known time.

Layers sleep, so the times hold on a busy machine too; the sleep is test-only and changes no number.
"""

import time

FORWARD_S, BACKWARD_S = 0.01, 0.02


def equal(rank, layer_number, iteration):
    """Every layer takes the same time everywhere."""
    return 1.0


def train_slowly(rank, world_size, factor, *argv):
    """Be one rank of the drop-in whose layers sleep."""
    import torch
    from megatron.core.transformer.transformer_layer import TransformerLayer
    from megatron.training.global_vars import get_args

    from megatron_dynmo import pretrain_gpt

    class SleepInBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden, seconds):
            ctx.seconds = seconds
            return hidden.clone()

        @staticmethod
        def backward(ctx, grad):
            time.sleep(ctx.seconds)
            return grad, None

    original = TransformerLayer.forward

    def forward(self, *args, **kwargs):
        hidden, context = original(self, *args, **kwargs)
        load = factor(rank, self.layer_number, get_args().curr_iteration)
        time.sleep(FORWARD_S * load)
        return SleepInBackward.apply(hidden, BACKWARD_S * load), context

    TransformerLayer.forward = forward
    pretrain_gpt.main(list(argv))
