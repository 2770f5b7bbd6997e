"""What changes a model's costs while it trains: one module a kind, all on one protocol.

A module `KIND` of this package has a class `DYNAMIC`; the flags of `megatron_dynmo.flags` say
which kinds a run uses.
"""
