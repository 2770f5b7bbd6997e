"""Tokens that leave before the last layer: exit heads, and layers over those that remain."""
