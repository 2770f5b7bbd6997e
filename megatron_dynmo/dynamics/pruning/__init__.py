"""Weights, neurons and heads that go while training: what goes, and in what form the rest lives."""
