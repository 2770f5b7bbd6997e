"""A layer of a move is built from a config as it was before training started."""

import copy
import threading
from dataclasses import fields

from megatron.core.model_parallel_config import ModelParallelConfig

from megatron_dynmo.adapters import model


def test_every_function_that_training_puts_into_the_config_is_known():
    functions = {
        field.name
        for field in fields(ModelParallelConfig)
        if "Callable" in str(field.type) and field.default is None
    }
    assert functions == set(model._SET_BY_TRAINING)


def test_a_layer_can_copy_the_config_though_training_has_put_its_functions_there():
    class Trainer:
        def __init__(self):
            self.lock = threading.Lock()  # like a process group, it cannot be copied

        def scale_loss(self, loss):
            return loss

    config = ModelParallelConfig()
    config.grad_scale_func = scale = Trainer().scale_loss
    with model._without_run(config):
        copied = copy.deepcopy(config)
    assert copied == ModelParallelConfig()
    assert config.grad_scale_func == scale
