"""AReaL: `RLVRWorkflow(reward_fn=penstock_reward, ...)`. See README.md.

AReaL calls a reward function for each completion, in a process of its own, with the dataset's other keys by name
(areal/api/reward_api.py). It takes what lasts longer than 15 seconds for 0, so this gives up before that.
"""

import http.client
import json
import logging
import os
import random
import time
import urllib.error
import urllib.request
from typing import Any

_log = logging.getLogger(__name__)
_FAULTS_ELSEWHERE = ("GOLD_INVALID", "FAILED")


def penstock_reward(
    prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, answer: Any = None, **data: Any
) -> float:
    """The reward of `completions`; the gold answers are the dataset's key `answer`, or `solution`.

    Raises:
        RuntimeError: the service did not answer, or refused the request; the message says why.
    """
    gold = answer if answer is not None else data.get("solution")
    if gold is None:
        raise RuntimeError("the data has neither a key 'answer' nor a key 'solution'; rename one")
    golds = [str(each) for each in gold] if isinstance(gold, list | tuple) else [str(gold)]
    profile = os.environ.get("PENSTOCK_REWARD_PROFILE", "math")
    (verdict,) = _ask([{"golds": golds, "response": completions, "profile": profile}])
    if verdict["status"] in _FAULTS_ELSEWHERE:
        _log.warning("%s for gold answer %r", verdict["status"], gold)
    return float(verdict["score"])


def _ask(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The verdicts of `items`, in their order; tried again while the service is away or full."""
    url = os.environ.get("PENSTOCK_REWARD_URL", "").rstrip("/")
    if not url:
        raise RuntimeError(
            "PENSTOCK_REWARD_URL is not set; set it to the reward service, such as http://127.0.0.1:8080"
        )
    body, headers = json.dumps({"items": items}).encode(), {"Content-Type": "application/json"}
    if token := os.environ.get("PENSTOCK_TOKEN"):
        headers["Authorization"] = f"Bearer {token}"
    request = urllib.request.Request(f"{url}/v1/verify:batch", body, headers)
    give_up_at = time.monotonic() + float(os.environ.get("PENSTOCK_REWARD_RETRY_S", "12"))
    wait_s = 0.1
    while True:
        try:
            with urllib.request.urlopen(request, timeout=max(1.0, give_up_at - time.monotonic())) as response:
                return json.load(response)["verdicts"]
        except urllib.error.HTTPError as error:
            reason = f"{error.code}: {error.read(2000).decode(errors='replace')}"
            if error.code not in (429, 502, 503, 504):
                raise RuntimeError(f"the reward service at {url} refused the request with {reason}") from None
        except (OSError, http.client.HTTPException) as error:  # nobody there, or gone before the answer was complete
            reason = str(error)
        if time.monotonic() + wait_s > give_up_at:
            raise RuntimeError(f"no reward from the service at {url}, the last time because of {reason}")
        _log.warning("reward service at %s: %s; trying again in %.1f s", url, reason, wait_s)
        time.sleep(wait_s * random.uniform(0.5, 1.0))
        wait_s = min(2 * wait_s, 10.0)
