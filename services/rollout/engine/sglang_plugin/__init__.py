"""Everything that runs inside SGLang's own processes, registered through SGLang's plugin entry points.

SGLang imports this package in every process that it starts, so its modules import torch and SGLang but nothing of the
engine's server.
"""
