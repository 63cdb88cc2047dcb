"""What an engine measures of the pushes that it takes."""

from penstock.telemetry import metrics

PUSHES = metrics.counter(
    "penstock_engine_pushes_total", "Pushes that ended in this engine: received, or aborted.", ("outcome",)
)
PUSH_SECONDS = metrics.histogram(
    "penstock_engine_push_seconds", "Seconds from a push's first call to generation with its weights."
)
STAGE_SECONDS = metrics.histogram(
    "penstock_engine_push_stage_seconds",
    "Seconds of each stage of a push: uploaded, paused, received, verified, committed.",
    ("stage",),
)
PAUSE_SECONDS = metrics.histogram(
    "penstock_engine_pause_seconds", "Seconds that the engine did not generate because of a push."
)
