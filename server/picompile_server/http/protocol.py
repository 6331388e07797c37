"""uvicorn's HTTP/1.1 with h11, which also notices that a client has disconnected after it sent more data."""

from __future__ import annotations

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

_MOST_BEHIND = 2**16


class WatchfulProtocol(H11Protocol):
    """Goes on reading while a request is answered.

    Uvicorn stops as soon as something follows the body, if only a line break, since it may be the next request. Then it
    does not learn either that the client has gone.
    """

    def data_received(self, data: bytes) -> None:
        """Take data that a client has sent."""
        super().data_received(data)
        behind, _ = self.conn.trailing_data
        if self.flow.read_paused and self.conn.their_state is h11.DONE and len(behind) <= _MOST_BEHIND:
            self.flow.resume_reading()
