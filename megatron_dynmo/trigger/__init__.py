"""When to move: a pure decision from measured windows, the same on every rank."""

from megatron_dynmo.trigger.appraisal import Choose
from megatron_dynmo.trigger.decision import Decision, TriggerSettings
from megatron_dynmo.trigger.history import CostHint
from megatron_dynmo.trigger.trigger import Trigger

__all__ = ["Choose", "CostHint", "Decision", "Trigger", "TriggerSettings"]
