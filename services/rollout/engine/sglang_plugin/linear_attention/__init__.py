"""Engines of models that attend linearly (Qwen3.5): what SGLang needs beside what every engine needs."""
