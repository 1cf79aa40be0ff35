"""When to ask a second time for an object that is late, and how often.

"The Tail at Scale" (Dean and Barroso, 2013): a batch waits for its slowest object, and a second
request, sent only to the few that are late, costs little and cuts the tail.
"""

from __future__ import annotations

_WEIGHT = 0.05  # of one new observation in the running means
_SPREADS = 8.0
_LEAST_S = 0.2
_MOST_S = 2.0  # what AWS advises for small objects when nothing is known
_SHARE = 0.02


class Hedges:
    """Learns what is usual, and keeps second requests below one in fifty.

    Args:
        allowed: False never allows one.
    """

    def __init__(self, allowed: bool) -> None:
        self.allowed = allowed
        self._seen = 0
        self._taken = 0
        self._mean_s = 0.0
        self._spread_s = 0.0

    @property
    def late_after_s(self) -> float:
        """After how long an object is late: far beyond the usual, from 0.2 s to 2 s."""
        if self._seen < 1 / _WEIGHT:
            return _MOST_S
        return min(max(self._mean_s + _SPREADS * self._spread_s, _LEAST_S), _MOST_S)

    def saw(self, took_s: float) -> None:
        """Learn from one object."""
        self._seen += 1
        weight = max(_WEIGHT, 1.0 / self._seen)
        self._spread_s += weight * (abs(took_s - self._mean_s) - self._spread_s)
        self._mean_s += weight * (took_s - self._mean_s)

    def take(self) -> bool:
        """Return whether one more is within the share, and count it."""
        if not self.allowed or self._taken >= 1 + _SHARE * self._seen:
            return False
        self._taken += 1
        return True
