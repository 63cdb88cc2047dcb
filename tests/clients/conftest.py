"""The harness of the frontend's own tests: two routers over simulated engines."""

from tests.integration.openai_frontend.conftest import harness, renderer, whole_harness

__all__ = ["harness", "renderer", "whole_harness"]
