"""TLS in front of a server that does not speak it, with a certificate authority that lives as long as the test."""

import select
import socket
import ssl
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

__all__ = ["Certificates", "TlsFront", "make_certificates"]

_PIECE = 1 << 16
_PATIENCE = 5.0  # seconds for a handshake


class Certificates(NamedTuple):
    """Files in PEM: the authority that clients must trust, and what a server shows."""

    ca_file: Path
    cert_file: Path
    key_file: Path


def make_certificates(folder: Path, *hosts: str) -> Certificates:
    """A fresh authority, and a certificate of its for these host names or addresses."""
    import trustme

    authority = trustme.CA()
    issued = authority.issue_cert(*hosts)
    files = Certificates(folder / "ca.pem", folder / "server.pem", folder / "server.key")
    folder.mkdir(parents=True, exist_ok=True)
    authority.cert_pem.write_to_path(str(files.ca_file))
    issued.private_key_pem.write_to_path(str(files.key_file))
    files.cert_file.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    return files


class TlsFront:
    """Listens with TLS on a free port of 127.0.0.1 (`port`), and passes what it hears to `upstream_port` in the
    clear. A context manager. Each connection has a thread."""

    def __init__(self, upstream_port: int, certificates: Certificates) -> None:
        self._upstream = ("127.0.0.1", upstream_port)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificates.cert_file, certificates.key_file)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._ends: set[socket.socket] = set()
        self._threads = [threading.Thread(target=self._accept, name="tls-front", daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        for end in [self._listener, *self._ends]:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # closed
                return
            client.settimeout(_PATIENCE)
            self._ends.add(client)
            thread = threading.Thread(target=self._serve, args=(client,), name="tls-front", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, raw: socket.socket) -> None:
        with suppress(OSError), raw, self._context.wrap_socket(raw, server_side=True) as client:
            self._ends.add(client)
            client.settimeout(None)
            with socket.create_connection(self._upstream) as server:
                _pass_both_ways(client, server)
            self._ends.discard(client)
        self._ends.discard(raw)


def _pass_both_ways(client: ssl.SSLSocket, server: socket.socket) -> None:
    while True:
        ready = [client] if client.pending() else select.select([client, server], [], [])[0]
        for source in ready:
            piece = source.recv(_PIECE)
            if not piece:
                return
            (server if source is client else client).sendall(piece)
