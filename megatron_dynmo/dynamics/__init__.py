"""What changes a model's costs while it trains: one package a kind, all on one protocol.

The module `dynamic` of a package has the kind's class, `DYNAMIC`; the flags of
`megatron_dynmo.flags` say which kinds a run uses.
"""
