"""Event simulator of pipeline schedules: what balancing would bring to a run, without a GPU.

A `CostTrace` says what every layer costs in every iteration, from the equations of a scenario or
from the events of a real run. A `Case` puts it on a pipeline, policies decide on the split of the
layers as the run goes on, and `compare` says what each policy makes of it. Results are simulated:
they are as good as the costs put in, and exact for the order of passes of the schedule.

Tier: pure, numpy and the standard library.
"""
