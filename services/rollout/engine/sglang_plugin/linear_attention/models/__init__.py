"""The architectures of Qwen3.5 that engines on CPUs load, as `sglang_plugin/models` has those of the other families.

They have a package of their own because SGLang's kernels for them take a second to import, which other engines save.
"""
