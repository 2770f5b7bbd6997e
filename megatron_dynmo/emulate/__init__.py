"""Emulated devices: what layers, links and moves cost in virtual time.

Pure: the model of the devices and its file. What touches Megatron is in `adapters/emulated.py`.
"""
