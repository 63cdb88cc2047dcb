"""Notes answers that were asked about and not judged: no reward may rest on one."""

import asyncio

from penstock.environments import Grade
from penstock.errors import PenstockError
from penstock.records import Verdict

_NOT_AWAITED = "the wait for the verdict was cut short"


class NotedGrade:
    """A way to the reward service as an environment gets it, whatever the environment does with the verdicts."""

    def __init__(self, judge: Grade) -> None:
        """Ask `judge`."""
        self._judge = judge
        self._unjudged = ""
        self._num_pending = 0

    async def grade(self, text: str) -> Verdict:
        """Return the verdict on `text`; see `penstock.environments.Grade`."""
        self._num_pending += 1
        try:
            verdict = await self._judge(text)
        except PenstockError as error:
            self._unjudged = str(error)
            raise
        except asyncio.CancelledError:
            self._unjudged = _NOT_AWAITED
            raise
        finally:
            self._num_pending -= 1
        if not verdict.is_judged:
            self._unjudged = f"verdict {verdict.status}"
        return verdict

    def take_unjudged(self) -> str:
        """Return why a text was not judged since the last call, or is not judged yet; empty if all were."""
        unjudged, self._unjudged = self._unjudged, ""
        return unjudged or (_NOT_AWAITED if self._num_pending else "")
