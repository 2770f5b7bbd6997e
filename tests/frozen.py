"""Imported last by the server that ranks are forked from: the collector leaves its objects alone.

A collection in a rank would otherwise go through a million objects of the imports, and copy the
memory that it shares with the server.
"""

import gc

gc.collect()
gc.freeze()
