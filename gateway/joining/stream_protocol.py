"""uvicorn's WebSocket protocol, which also says which certificate the other end has shown."""

from __future__ import annotations

from asyncio.transports import BaseTransport

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from gateway.joining.door import CERTIFICATE


class StreamProtocol(WebSocketsSansIOProtocol):
    """TLS has checked the certificate against the roots by the time it is read here."""

    def connection_made(self, transport: BaseTransport) -> None:
        """A connection was handed over by the HTTP protocol."""
        super().connection_made(transport)
        tls = transport.get_extra_info("ssl_object")
        shown = None if tls is None else tls.getpeercert(binary_form=True)
        if shown:
            self.app_state = {**self.app_state, CERTIFICATE: shown}
