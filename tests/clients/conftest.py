"""The stage of the frontend's own tests: two routers over simulated engines."""

from tests.integration.openai_frontend.conftest import renderer, stage, whole_stage

__all__ = ["renderer", "stage", "whole_stage"]
