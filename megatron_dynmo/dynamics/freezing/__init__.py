"""Layers frozen from the front: what decides it, and what a frozen layer still costs."""
