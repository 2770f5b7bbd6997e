"""What a model costs before it runs: parameters, FLOPs, bytes and the best layout; pure."""
