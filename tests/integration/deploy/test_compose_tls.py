"""The section TLS of deploy/.env.example: what it makes of the services' settings."""

import re
from pathlib import Path

import pytest
import yaml

from penstock import config as configuration
from penstock import shipped
from services.recipe import Recipe

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"


@pytest.mark.parametrize("file", ["docker-compose.yml", "docker-compose.gpu.yml"])
def test_agents_call_the_router_as_it_serves(file: str) -> None:
    """By HTTPS with the example's arguments, and by HTTP without them."""
    examples = re.findall(r"^#   ([A-Z_]+)=(.*)$", (DEPLOY / ".env.example").read_text(), re.MULTILINE)
    command = yaml.safe_load((DEPLOY / file).read_text())["services"]["worker"]["command"]
    for given, url in ((dict(examples)["PENSTOCK_ARGS"], "https://router:7080"), ("", "http://router:7080")):
        overrides = command.replace("${PENSTOCK_ARGS:-}", given).split()[2:]
        recipe = configuration.load(Recipe, [shipped.named_recipe("tiny-cpu")], overrides)
        assert recipe.worker.router_url == url
        assert bool(recipe.security.tls_cert) == url.startswith("https:")
