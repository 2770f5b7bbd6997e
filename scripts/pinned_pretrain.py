"""The drop-in with each rank pinned to a core of its own, for timings on a CPU.

torchrun --nproc-per-node N scripts/pinned_pretrain.py ARGS
"""

import os

cores = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, {cores[int(os.environ["LOCAL_RANK"]) % len(cores)]})

from megatron_dynmo import pretrain_gpt  # noqa: E402

pretrain_gpt.main()
