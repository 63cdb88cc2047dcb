"""A ledger of groups, for tests of what becomes of them."""

import json

from services.trainer.admission.ledger import GroupLedger

NUM_STEPS_LEFT = 10**6


def restored(ledger: GroupLedger[str, str]) -> GroupLedger[str, str]:
    """What a trainer that starts from a checkpoint of this moment has."""
    return GroupLedger.from_state(json.loads(json.dumps(ledger.checkpoint().state)), ledger.gate)
