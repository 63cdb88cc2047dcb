"""Hedged legs: a replica that is slow to begin is not waited for when another has a place to spare.

The same leg is then sent to both; the first that delivers has it, and the other's call is aborted ("The Tail at Scale",
Dean and Barroso, 2013). Invariant: of two legs, the chunks of one are taken.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable

from penstock.errors import UnavailableError
from services.router.place import Place


class Race:
    """Who plays one leg: one place, or two until one of them delivers."""

    def __init__(self, place: Place) -> None:
        """The leg is begun at `place`."""
        self.place = place
        """Whose leg it is: the first one's until another has won."""
        self.is_hedged = False
        """Whether another was asked as well."""
        self._places = [place]
        self._is_won = False

    def wins(self, place: Place) -> bool:
        """Whether the chunk that has come to this place is to be taken; the first that asks has won."""
        if not self._is_won:
            self._is_won, self.place = True, place
        return self.place is place

    @property
    def culprits(self) -> frozenset[str]:
        """Ids of the replicas whose failure it is if the leg fails."""
        places = [self.place] if self._is_won else self._places
        return frozenset(place.culprit.member.candidate.replica_id for place in places)

    async def run(
        self,
        play: Callable[[Place], AsyncGenerator[bytes, None]],
        find_second: Callable[[], Place | None],
        *,
        after_s: float,
    ) -> AsyncGenerator[bytes, None]:
        """The chunks of the leg. Leaving early ends it at both places.

        Args:
            play: Plays the leg at a place and gives that back; asks `wins` before it takes a chunk.
            find_second: Another place, if there is one to spare.
            after_s: When to ask for it, if nothing has come.

        Raises:
            PenstockError: no place could play it; the error is the first one's where both failed.
        """
        legs = [play(self.place)]
        beginnings = [asyncio.create_task(_first_of(legs[0]))]
        try:
            await asyncio.wait(beginnings, timeout=after_s)
            if not beginnings[0].done() and (second := find_second()) is not None:
                self.is_hedged = True
                self._places.append(second)
                legs.append(play(second))
                beginnings.append(asyncio.create_task(_first_of(legs[1])))
            number = await _first_to_deliver(beginnings)
            await _end(beginnings[1 - number : 2 - number], legs[1 - number : 2 - number])
            if (chunk := beginnings[number].result()) is None:  # it lost to one that then failed
                raise UnavailableError("neither of two replicas delivered anything")
            yield chunk
            async for chunk in legs[number]:
                yield chunk
        finally:
            await _end(beginnings, legs)


async def _first_of(chunks: AsyncGenerator[bytes, None]) -> bytes | None:
    return await anext(chunks, None)


async def _first_to_deliver(beginnings: list[asyncio.Task[bytes | None]]) -> int:
    """The number of the one that delivers first; 0 if none does."""
    pending = set(beginnings)
    while pending:
        _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for number, beginning in enumerate(beginnings):
            if beginning.done() and beginning.exception() is None and beginning.result() is not None:
                return number
    return 0


async def _end(beginnings: list[asyncio.Task[bytes | None]], legs: list[AsyncGenerator[bytes, None]]) -> None:
    for beginning in beginnings:
        beginning.cancel()
    await asyncio.gather(*beginnings, return_exceptions=True)
    for leg in legs:
        await leg.aclose()
