"""Bytes that ride on pipeline messages: exact, without gradients, nothing without a channel."""

from types import SimpleNamespace

import pytest
import torch

from megatron_dynmo.dynamics import side_channel
from megatron_dynmo.dynamics.side_channel import SideChannel, widened

LENGTH, BATCH, HIDDEN, COLUMNS = 16, 16, 4, 2


class _Block(torch.nn.Module):
    """A stage: two layers that add one to the bytes and double the hidden states."""

    def __init__(self, channel, *, is_first, is_last, num_layers=2):
        super().__init__()
        self.pre_process, self.post_process = is_first, is_last
        self.input_tensor = None
        self._channel, self._num_layers = channel, num_layers

    def forward(self, hidden, context=None):
        hidden = hidden if self.pre_process else self.input_tensor
        for _ in range(self._num_layers):
            hidden, context = hidden * 2, context + 1
            self._channel.latest = context
        assert hidden.shape[-1] == HIDDEN and hidden.is_contiguous()
        return hidden.clone()


class _Core(torch.nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, tokens, hidden):
        return self.block(hidden)


@pytest.fixture(autouse=True)
def no_channel_left():
    yield
    side_channel._num_columns = 0


def _stage(**place):
    channel = SideChannel(COLUMNS, lambda tokens: tokens.t()[..., None].repeat(1, 1, COLUMNS))
    block = _Block(channel, **place)
    core = _Core(block)
    channel.attach([SimpleNamespace(core=core, block=block)])
    return channel, core


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("num_layers", [0, 2], ids=["an empty stage", "two layers"])
def test_every_byte_crosses_exactly_and_gradients_reach_the_hidden_states_alone(dtype, num_layers):
    _, first = _stage(is_first=True, is_last=False, num_layers=0)
    middle_channel, middle = _stage(is_first=False, is_last=False, num_layers=num_layers)
    _, last = _stage(is_first=False, is_last=True, num_layers=0)
    tokens = torch.arange(LENGTH * BATCH, dtype=torch.uint8).view(BATCH, LENGTH)
    hidden = torch.randn(LENGTH, BATCH, HIDDEN, dtype=dtype, requires_grad=True)
    sent = first(tokens, hidden)
    assert tuple(sent.shape) == widened((LENGTH, BATCH, HIDDEN))
    received = sent.detach().requires_grad_()
    middle.block.input_tensor = received
    sent_on = middle(None, None)
    assert torch.equal(middle_channel.latest[..., 1], tokens.t() + num_layers)
    received_last = sent_on.detach().requires_grad_()
    last.block.input_tensor = received_last
    out = last(None, None)
    assert torch.equal(out, hidden * 2**num_layers)
    out.float().sum().backward()
    sent_on.backward(received_last.grad)
    assert torch.equal(
        received.grad[..., HIDDEN:], torch.zeros(LENGTH, BATCH, COLUMNS, dtype=dtype)
    )
    sent.backward(received.grad)
    assert torch.equal(hidden.grad, torch.full_like(hidden, 2.0**num_layers))


def test_messages_keep_their_shape_without_a_channel():
    assert widened((8, 2, 64)) == (8, 2, 64)
    _stage(is_first=True, is_last=True)
    assert widened((8, 2, 64)) == (8, 2, 64 + COLUMNS)
    assert widened(None) is None and widened(()) == ()
