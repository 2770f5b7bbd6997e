"""Memory of layers that keep known numbers of bytes, as the profiler reads it."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_dynmo.clock import VirtualClock
from megatron_dynmo.profiler import ChunkModules, LayerProfiler, StaticBytes


class Keeps(torch.nn.Module):
    """A layer that keeps a known number of bytes: its input and a product, 2 x 4 floats each."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, 4))

    def forward(self, hidden_states, attention_mask=None):
        product = hidden_states @ self.weight  # keeps its input, and the weight, which is no cost
        if attention_mask is not None:
            product = product.masked_fill(attention_mask, 0.0)
        return product.tanh(), None  # keeps its output


def _memory_sample(chunk, run, **kwargs):
    profiler = LayerProfiler(VirtualClock())
    profiler.attach([chunk], **kwargs)
    profiler.begin_iteration()
    with profiler.forward_step(0) as produced:
        output = run(torch.ones(2, 4, requires_grad=True))
        produced(output)
    with profiler.backward_step(output):
        output.sum().backward()
    return profiler.end_iteration()


def test_activation_bytes_are_what_the_graph_keeps():
    layers = (Keeps(), Keeps(), Keeps())
    mask = torch.zeros(2, 4, dtype=torch.bool)

    def run(x):
        hidden, _ = layers[0](x)  # keeps x and its own output
        hidden, _ = layers[1](hidden_states=hidden)  # its input is counted: only its output
        hidden, _ = layers[2](hidden, attention_mask=mask)  # and the mask
        return hidden.exp().exp()  # the extra: two outputs

    chunk = ChunkModules(0, tuple(enumerate(layers, 1)), output=torch.nn.Identity())
    sample = _memory_sample(chunk, run)
    assert [layer.activation_bytes for layer in sample.layers] == [64, 32, 40]
    assert sample.last_extra.activation_bytes == 64


def test_shared_mask_counts_once():
    layers = (Keeps(), Keeps())
    mask = torch.zeros(2, 4, dtype=torch.bool)

    def run(x):
        return layers[1](layers[0](x, attention_mask=mask)[0], attention_mask=mask)[0]

    sample = _memory_sample(ChunkModules(0, tuple(enumerate(layers, 1))), run)
    assert [layer.activation_bytes for layer in sample.layers] == [72, 32]


def test_recomputed_group_keeps_its_input_only():
    layers = (Keeps(), Keeps(), Keeps())

    def run(x):
        pair = checkpoint(lambda h: layers[1](layers[0](h)[0])[0], x, use_reentrant=True)
        return layers[2](pair)[0]

    sample = _memory_sample(ChunkModules(0, tuple(enumerate(layers, 1))), run)
    assert [layer.activation_bytes for layer in sample.layers] == [32, 0, 64]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_sparse_matrices_are_measured_too():
    def csr(value):
        rows, columns = torch.arange(5), torch.arange(4)
        values = torch.full((4,), value)
        return torch.sparse_csr_tensor(rows, columns, values, (4, 4), check_invariants=True)

    class Sparse(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(csr(0.5))

        def forward(self, hidden_states):
            self.mask = csr(1.0)
            return torch.sparse.mm(self.mask, hidden_states) + self.weight @ hidden_states, None

    layer = Sparse()
    chunk = ChunkModules(0, ((1, layer),))
    sample = _memory_sample(chunk, lambda x: layer(x.repeat(2, 1))[0])
    hidden_bytes, mask_bytes = 4 * 4 * 4, 5 * 8 + 4 * 8 + 4 * 4
    assert sample.layers[0].activation_bytes == hidden_bytes + mask_bytes


def test_static_bytes_come_from_the_adapter():
    layer = Keeps()
    static = StaticBytes({1: 640, 2: 1}, embedding=7, output=9)
    chunk = ChunkModules(0, ((1, layer),), torch.nn.Identity(), torch.nn.Identity())
    sample = _memory_sample(chunk, lambda x: layer(x)[0], static_bytes=lambda: static)
    assert sample.layers[0].static_bytes == 640
    assert sample.first_extra.static_bytes == 7
    assert sample.last_extra.static_bytes == 9
    assert sample.peak_memory_bytes > 0
