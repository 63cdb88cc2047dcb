"""The reward service as one episode's environment reaches it.

Invariant: a failed grading never becomes a reward, whatever the environment does with it. A fault of the data reaches
the group. A step whose reward may rest on an unjudged answer leaves its sample unjudged.
"""

from penstock.errors import InvalidRequestError, PenstockError, UserError
from penstock.records import Prompt, Verdict
from services.rollout.worker.answer_verifier import AnswerVerifier
from services.rollout.worker.episodes.clock import EpisodeClock
from services.rollout.worker.episodes.noted_grade import NotedGrade


class Grading(NotedGrade):
    """The grade handle of one episode."""

    def __init__(self, answer_verifier: AnswerVerifier, prompt: Prompt, item_id: str, clock: EpisodeClock) -> None:
        """Have `answer_verifier` verify answers to `prompt` as those of sample `item_id`; pause `clock` meanwhile."""
        super().__init__(self._verify)
        self._answer_verifier = answer_verifier
        self._prompt = prompt
        self._item_id = item_id
        self._clock = clock
        self._fault: PenstockError | None = None

    async def _verify(self, text: str) -> Verdict:
        """Return the verdict on `text`.

        Raises:
            PenstockError: the reward service cannot judge: it has not answered for a long time, or refuses the golds.
        """
        try:
            with self._clock.paused():
                [verdict] = await self._answer_verifier.verify(self._prompt, [(self._item_id, text)])
        except (InvalidRequestError, UserError) as error:
            self._fault = error
            raise
        return verdict

    def require_sound(self) -> None:
        """Raise faults of the data or the set-up, whether or not the environment did.

        Raises:
            InvalidRequestError: the gold answers are wrong, or there is no such profile.
            UserError: the reward service is permanently out of reach.
        """
        if self._fault is not None:
            raise self._fault
