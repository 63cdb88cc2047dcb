"""The architectures that engines on CPUs load: SGLang's own classes, one module each.

SGLang imports every module of this package (`SGLANG_EXTERNAL_MODEL_PACKAGE`) and finds the architecture here, instead
of importing its two hundred model files. Other architectures still load, but more slowly.
"""
