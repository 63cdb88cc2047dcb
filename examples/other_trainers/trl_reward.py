"""TRL: `GRPOTrainer(reward_funcs=penstock_reward, ...)`. See README.md.

TRL calls a reward function with lists over the batch, prompts and completions as text or as chat messages, and the
dataset's other columns by name (trl/rewards/accuracy_rewards.py). TRL 1.6 and later leave a sample with reward None
out; earlier versions give it 0.
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
    prompts: list[Any],
    completions: list[Any],
    answer: list[Any] | None = None,
    solution: list[Any] | None = None,
    **_: Any,
) -> list[float | None]:
    """The rewards of `completions`; the gold answers are the dataset's column `answer` or `solution`.

    Raises:
        RuntimeError: the service did not answer, or refused the request; the message says why.
    """
    golds = answer if answer is not None else solution
    if golds is None:
        raise RuntimeError("the dataset has neither a column 'answer' nor a column 'solution'; rename one")
    profile = os.environ.get("PENSTOCK_REWARD_PROFILE", "math")
    items = [
        {
            "golds": [str(each) for each in gold] if isinstance(gold, list | tuple) else [str(gold)],
            "response": _text(completion),
            "profile": profile,
        }
        for completion, gold in zip(completions, golds, strict=True)
    ]
    verdicts = _ask(items)
    for verdict, gold in zip(verdicts, golds, strict=True):
        if verdict["status"] in _FAULTS_ELSEWHERE:
            _log.warning("%s for gold answer %r", verdict["status"], gold)
    return [None if verdict["status"] in _FAULTS_ELSEWHERE else verdict["score"] for verdict in verdicts]


def _text(completion: Any) -> str:
    """The last message of a chat, or the text itself; of content in parts, the texts."""
    content = completion if isinstance(completion, str) else completion[-1]["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content or ())


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
    give_up_at = time.monotonic() + float(os.environ.get("PENSTOCK_REWARD_RETRY_S", "120"))
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
