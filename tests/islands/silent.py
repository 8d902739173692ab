"""A store that accepts connections, reads what it is sent, and never says anything."""

import contextlib
import socket
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def silent_server(port: int = 0) -> Iterator[str]:
    """Yield the URL of a server that is silent until the end of the block."""
    with socket.create_server(("127.0.0.1", port)) as server, contextlib.ExitStack() as stack:

        def accept() -> None:
            with contextlib.suppress(OSError):  # the end of the block
                while True:
                    stack.enter_context(server.accept()[0])

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
