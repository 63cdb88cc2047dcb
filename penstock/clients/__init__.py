"""Typed clients of the services, for services and users alike; they need neither torch nor a recipe.

Every call has a deadline. A failed call raises the error of `penstock.errors` that gives the reason and names the
server. Cancelling the task that awaits a call cancels the call at the server.
"""

from penstock.clients.generate import GenerateClient
from penstock.clients.reward import RewardClient
from penstock.clients.router import RouterClient
from penstock.clients.trainer import TrainerClient

__all__ = ["GenerateClient", "RewardClient", "RouterClient", "TrainerClient"]
